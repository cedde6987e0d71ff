// Partial results and merge().
#include <cmath>
#include <limits>

#include "support/kernel_test.h"

namespace flashcore::test {
namespace {

class Merge : public KernelTest {
 protected:
  /// The partial result of keys [begin, end). Positions do not change.
  Output partial(const Inputs& inputs, std::int64_t begin, std::int64_t end) {
    Inputs part = inputs;
    part.options.partial = true;
    part.k = take(inputs.k, 2, range(begin, end));
    part.v = take(inputs.v, 2, range(begin, end));
    for (Tensor Inputs::*tensor : {&Inputs::bias, &Inputs::mask}) {
      if ((inputs.*tensor).given()) part.*tensor = take(inputs.*tensor, 3, range(begin, end));
    }
    const auto batch = static_cast<std::size_t>(inputs.q.size(0));
    part.q_start = ints(std::vector<std::int64_t>(batch, inputs.k.size(2) - inputs.q.size(2)));
    part.k_start = ints(std::vector<std::int64_t>(batch, begin));
    Output output = attend(part);
    EXPECT_TRUE(output.status.ok()) << output.status.message();
    return output;
  }

  /// Partial results of `count` random key ranges. Some ranges may be empty.
  std::vector<Output> partials(const Inputs& inputs, std::int64_t count) {
    std::vector<std::int64_t> bounds{0, inputs.k.size(2)};
    for (std::int64_t i = 1; i < count; ++i) bounds.push_back(random().between(0, bounds[1]));
    std::sort(bounds.begin(), bounds.end());
    std::vector<Output> parts;
    for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
      parts.push_back(partial(inputs, bounds[i], bounds[i + 1]));
    }
    return parts;
  }

  Output merged(const std::vector<const Output*>& parts, DType out, const Tensor& sinks = {}) {
    Output result;
    result.out = Tensor(out, parts[0]->out.shape());
    result.lse = Tensor(parts[0]->lse.dtype(), parts[0]->lse.shape());
    std::vector<PartialResult> views;
    for (const Output* part : parts) views.push_back({part->out.view(), part->lse.view()});
    result.status = merge(views, result.out.view(), result.lse.view(), sinks.view());
    EXPECT_TRUE(result.status.ok()) << result.status.message();
    return result;
  }
  Output all_merged(const std::vector<Output>& parts, DType out, const Tensor& sinks = {}) {
    std::vector<const Output*> pointers;
    for (const Output& part : parts) pointers.push_back(&part);
    return merged(pointers, out, sinks);
  }

  Inputs draw() {
    Inputs inputs = draw_call(random(), kernel());
    inputs.sinks = {};
    return inputs;
  }

  /// A merged result in the form of one call, for verdict().
  Output as_call(const Inputs& inputs, const Output& merged_result) {
    Output output = attend(inputs, {.out = merged_result.out.dtype()});
    output.out = merged_result.out;
    output.lse = merged_result.lse;
    return output;
  }
};
FLASHCORE_FOR_EACH_KERNEL(Merge);

TEST_P(Merge, PartialsOfKeyRangesEqualOneCall) {
  for (int n = 0; n < rounds(12); ++n) {
    const Inputs inputs = draw();
    const Output merged_result = all_merged(partials(inputs, random().between(1, 6)), dtype());
    EXPECT_EQ(verdict(inputs, as_call(inputs, merged_result)), "");
  }
}

TEST_P(Merge, SinksCountInTheLastMergeOnly) {
  for (int n = 0; n < rounds(8); ++n) {
    Inputs inputs = draw();
    inputs.sinks = draw_normal(random(), DType::f32, {inputs.q.size(1)}, 3.0);
    const std::vector<Output> parts = partials(inputs, 3);  // partial calls ignore the sinks
    Inputs without = inputs;
    without.sinks = {};
    EXPECT_EQ(verdict(without, as_call(without, all_merged(parts, dtype()))), "");
    EXPECT_EQ(verdict(inputs, as_call(inputs, all_merged(parts, dtype(), inputs.sinks))), "");
    const Output early = merged({&parts[0], &parts[1]}, wide(dtype()));
    const Output last = merged({&early, &parts[2]}, dtype(), inputs.sinks);
    EXPECT_EQ(verdict(inputs, as_call(inputs, last)), "");
  }
}

TEST_P(Merge, OnePartialIsReturnedBitForBit) {
  const Inputs inputs = draw();
  const Output part = partial(inputs, 0, inputs.k.size(2));
  const Output merged_result = merged({&part}, wide(dtype()));
  FLASHCORE_EXPECT_SAME(merged_result, part);
}

TEST_P(Merge, EmptyPartialsChangeNoBit) {
  for (int n = 0; n < rounds(10); ++n) {
    const Inputs inputs = draw();
    const std::vector<Output> parts = partials(inputs, 2);
    Output empty = partial(inputs, 0, 0);
    for (const double lse : empty.lse.values()) {
      ASSERT_EQ(lse, -std::numeric_limits<double>::infinity());
    }
    for (const double x : empty.out.values()) ASSERT_EQ(x, 0.0);
    empty.out.fill(std::numeric_limits<double>::quiet_NaN());  // must not be read
    const Output both = merged({&parts[0], &parts[1]}, wide(dtype()));
    const Output first = merged({&empty, &parts[0], &parts[1]}, wide(dtype()));
    const Output middle = merged({&parts[0], &empty, &empty, &parts[1]}, wide(dtype()));
    const Output last = merged({&parts[0], &parts[1], &empty}, wide(dtype()));
    FLASHCORE_EXPECT_SAME(first, both);
    FLASHCORE_EXPECT_SAME(middle, both);
    FLASHCORE_EXPECT_SAME(last, both);
  }
}

TEST_P(Merge, MorePartsThanTheTableHolds) {
  for (int n = 0; n < rounds(3); ++n) {
    Inputs inputs = draw();
    inputs.sinks = draw_normal(random(), DType::f32, {inputs.q.size(1)}, 3.0);
    const std::vector<Output> parts = partials(inputs, random().between(kMaxMergeParts + 1, 80));
    EXPECT_EQ(verdict(inputs, as_call(inputs, all_merged(parts, dtype(), inputs.sinks))), "");
  }
  // Empty partials move a merge from the short table to the long one, and change no bit.
  const Inputs inputs = draw();
  std::vector<Output> parts = partials(inputs, kMaxMergeParts);
  const Output short_table = all_merged(parts, wide(dtype()));
  const Output empty = partial(inputs, 0, 0);
  for (const std::ptrdiff_t at : {0, 7, 33}) parts.insert(parts.begin() + at, empty);
  FLASHCORE_EXPECT_SAME(all_merged(parts, wide(dtype())), short_table);
}

TEST_P(Merge, IsAssociativeWithinRounding) {
  for (int n = 0; n < rounds(8); ++n) {
    const Inputs inputs = draw();
    const std::vector<Output> p = partials(inputs, 3);
    const Output ab = merged({&p[0], &p[1]}, wide(dtype()));
    const Output bc = merged({&p[1], &p[2]}, wide(dtype()));
    const Output left = merged({&ab, &p[2]}, wide(dtype()));
    const Output right = merged({&p[0], &bc}, wide(dtype()));
    for (const Output* merged_result : {&left, &right}) {
      EXPECT_EQ(verdict(inputs, as_call(inputs, *merged_result)), "");
    }
    const double unit = dtype() == DType::f64 ? 0x1p-52 : 0x1p-24;
    const auto a = left.out.values(), b = right.out.values();
    for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 64 * unit);
    const auto lse_a = left.lse.values(), lse_b = right.lse.values();
    for (std::size_t i = 0; i < lse_a.size(); ++i) {
      if (!std::isfinite(lse_a[i])) {
        ASSERT_EQ(lse_a[i], lse_b[i]);
      } else {
        ASSERT_NEAR(lse_a[i], lse_b[i], 16 * unit * (1 + std::fabs(lse_a[i])));
      }
    }
  }
}

TEST_P(Merge, NarrowResultsAreRoundedWideResults) {
  const Inputs inputs = draw();
  const std::vector<Output> parts = partials(inputs, 4);
  const Output exact = all_merged(parts, wide(dtype()));
  for (const DType out : {DType::f16, DType::bf16, DType::f32}) {
    const Output narrow = all_merged(parts, out);
    FLASHCORE_EXPECT_SAME_BITS(narrow.out, converted(exact.out, out));
    FLASHCORE_EXPECT_SAME_BITS(narrow.lse, exact.lse);
  }
}

TEST_P(Merge, VarlenAndStridedTensorsGiveTheSameBits) {
  const Inputs inputs = draw();
  const std::vector<Output> parts = partials(inputs, 2);
  const Output want = all_merged(parts, wide(dtype()));
  for (const MemoryLayout layout : {MemoryLayout::rows_first, MemoryLayout::padded,
                                    MemoryLayout::misaligned, MemoryLayout::strided_columns}) {
    std::vector<Output> arranged = parts;
    for (Output& part : arranged) {
      part.out = rearranged(part.out, layout);
      part.lse = rearranged(part.lse, layout);
    }
    const Output merged_result = all_merged(arranged, wide(dtype()));
    FLASHCORE_EXPECT_SAME(merged_result, want);
  }
  // [batch, heads, len, dim] of a batch of 1 is varlen [len, heads, dim] with swapped axes.
  Output varlen;
  varlen.out = Tensor(wide(dtype()), {inputs.q.size(2), inputs.q.size(1), inputs.v.size(3)});
  varlen.lse = Tensor(wide(dtype()), {inputs.q.size(1), inputs.q.size(2)});
  std::vector<PartialResult> views;
  for (const Output& part : parts) {
    PartialResult view{part.out.view(), part.lse.view()};
    TensorView& out = view.out;
    out.rank = 3;
    const TensorView whole = part.out.view();
    const int axes[] = {2, 1, 3};
    for (int i = 0; i < 3; ++i) {
      out.shape[i] = whole.shape[axes[i]];
      out.strides[i] = whole.strides[axes[i]];
    }
    view.lse.rank = 2;
    for (int i = 0; i < 2; ++i) {
      view.lse.shape[i] = part.lse.view().shape[i + 1];
      view.lse.strides[i] = part.lse.view().strides[i + 1];
    }
    views.push_back(view);
  }
  const Status status = merge(views, varlen.out.view(), varlen.lse.view());
  ASSERT_TRUE(status.ok()) << status.message();
  for (std::int64_t h = 0; h < inputs.q.size(1); ++h) {
    for (std::int64_t i = 0; i < inputs.q.size(2); ++i) {
      ASSERT_EQ(varlen.lse.at({h, i}), want.lse.at({0, h, i}));
      ASSERT_EQ(varlen.out.at({i, h, 0}), want.out.at({0, h, i, 0}));
    }
  }
}

}  // namespace
}  // namespace flashcore::test
