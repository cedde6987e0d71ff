// Lengths and positions: varlen sequences, used lengths, starts.
#include <limits>

#include "support/kernel_test.h"

namespace flashcore::test {
namespace {

class Lengths : public KernelTest {
 protected:
  /// A separate call for one sequence of a batch, truncated to its lengths.
  Inputs single(const Inputs& inputs, std::int64_t b, std::int64_t q_len, std::int64_t kv_len) {
    Inputs one = take_batch(inputs, {b});
    one.q = take(one.q, 2, range(0, q_len));
    one.k = take(one.k, 2, range(0, kv_len));
    one.v = take(one.v, 2, range(0, kv_len));
    for (Tensor Inputs::*tensor : {&Inputs::bias, &Inputs::mask}) {
      if (!(one.*tensor).given()) continue;
      if ((inputs.*tensor).size(0) == 1) one.*tensor = take(inputs.*tensor, 0, {0});
      one.*tensor = take(one.*tensor, 3, range(0, kv_len));
      if ((one.*tensor).size(2) > 1) one.*tensor = take(one.*tensor, 2, range(0, q_len));
    }
    one.used_k = {};
    return one;
  }

  /// Rows [first, first + count) of a varlen output, as [1, heads, count, dim] and [1, heads,
  /// count].
  static Output dense_rows(const Output& varlen, std::int64_t first, std::int64_t count) {
    Output one;
    const std::int64_t heads = varlen.out.size(1), dim = varlen.out.size(2);
    one.out = Tensor(varlen.out.dtype(), {1, heads, count, dim});
    one.lse = Tensor(varlen.lse.dtype(), {1, heads, count});
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < count; ++i) {
        one.lse.set({0, h, i}, varlen.lse.at({h, first + i}));
        for (std::int64_t d = 0; d < dim; ++d) {
          one.out.set({0, h, i, d}, varlen.out.at({first + i, h, d}));
        }
      }
    }
    return one;
  }

  /// Concatenates the sequences: [batch, heads, len, dim] to [total, heads, dim].
  static Tensor to_varlen(const Tensor& t, const std::vector<std::int64_t>& ends) {
    Tensor varlen(t.dtype(), {ends.back(), t.size(1), t.size(3)});
    for (std::size_t b = 0; b + 1 < ends.size(); ++b) {
      for (std::int64_t row = ends[b]; row < ends[b + 1]; ++row) {
        for (std::int64_t h = 0; h < t.size(1); ++h) {
          for (std::int64_t d = 0; d < t.size(3); ++d) {
            varlen.set({row, h, d}, t.at({static_cast<std::int64_t>(b), h, row - ends[b], d}));
          }
        }
      }
    }
    return varlen;
  }

  std::vector<std::int64_t> draw_ends(std::int64_t batch, std::int64_t most) {
    std::vector<std::int64_t> ends{0};
    for (std::int64_t b = 0; b < batch; ++b) {
      ends.push_back(ends.back() + (random().chance(0.15) ? 0 : random().between(1, most)));
    }
    return ends;
  }
};
FLASHCORE_FOR_EACH_KERNEL(Lengths);

TEST_P(Lengths, VarlenSequencesEqualSeparateCalls) {
  for (int n = 0; n < rounds(15); ++n) {
    Sizes sizes = draw_sizes(random(), kernel());
    sizes.batch = 4;
    Inputs padded = draw_inputs(random(), kernel(), sizes);
    add_score_options(random(), padded);
    padded.bias = {};
    padded.options.causal = random().chance(0.5);
    if (random().chance(0.3)) padded.options.window_left = random().between(0, sizes.kv_len);
    padded.options.num_splits = 1;  // split boundaries depend on the capacity, which differs
    const auto q_ends = draw_ends(4, sizes.q_len), k_ends = draw_ends(4, sizes.kv_len);
    const bool varlen_q = random().chance(0.7), varlen_k = !varlen_q || random().chance(0.7);
    Inputs varlen = padded;
    if (varlen_q) {
      varlen.q = to_varlen(padded.q, q_ends);
      varlen.cu_seqlens_q = ints(q_ends);
      if (random().chance(0.5)) varlen.options.max_q_len = sizes.q_len;
    }
    if (varlen_k) {
      varlen.k = to_varlen(padded.k, k_ends);
      varlen.v = to_varlen(padded.v, k_ends);
      varlen.cu_seqlens_k = ints(k_ends);
      if (random().chance(0.5)) varlen.options.max_kv_len = sizes.kv_len;
    }
    const Output output = attend(varlen);
    ASSERT_TRUE(output.status.ok()) << output.status.message();
    EXPECT_EQ(verdict(varlen, output), "");
    for (std::size_t b = 0; b < 4; ++b) {
      const auto sequence = static_cast<std::int64_t>(b);
      const std::int64_t q_len = varlen_q ? q_ends[b + 1] - q_ends[b] : sizes.q_len;
      const std::int64_t kv_len = varlen_k ? k_ends[b + 1] - k_ends[b] : sizes.kv_len;
      if (q_len == 0) continue;
      const Output want = attend(single(padded, sequence, q_len, kv_len));
      ASSERT_TRUE(want.status.ok()) << want.status.message();
      if (varlen_q) {
        const Output got = dense_rows(output, q_ends[b], q_len);
        FLASHCORE_EXPECT_SAME(got, want);
      } else {
        FLASHCORE_EXPECT_SAME_BITS(take(output.out, 0, {sequence}), want.out);
        FLASHCORE_EXPECT_SAME_BITS(take(output.lse, 0, {sequence}), want.lse);
      }
    }
  }
}

TEST_P(Lengths, VarlenSequencesMayBeSplit) {
  for (int n = 0; n < rounds(10); ++n) {
    Sizes sizes = draw_sizes(random(), kernel());
    sizes.batch = 3;
    const Inputs padded = draw_inputs(random(), kernel(), sizes);
    const auto q_ends = draw_ends(3, sizes.q_len), k_ends = draw_ends(3, sizes.kv_len);
    Inputs varlen = padded;
    varlen.q = to_varlen(padded.q, q_ends);
    varlen.k = to_varlen(padded.k, k_ends);
    varlen.v = to_varlen(padded.v, k_ends);
    varlen.cu_seqlens_q = ints(q_ends);
    varlen.cu_seqlens_k = ints(k_ends);
    varlen.sinks = draw_normal(random(), DType::f32, {sizes.q_heads});
    varlen.options.num_splits = static_cast<std::int32_t>(random().between(2, 4));
    EXPECT_EQ(verdict(varlen, attend(varlen)), "");
  }
}

TEST_P(Lengths, UsedLengthsEqualShorterTensors) {
  for (int n = 0; n < rounds(15); ++n) {
    Sizes sizes = draw_sizes(random(), kernel());
    sizes.batch = 3;
    Inputs inputs = draw_inputs(random(), kernel(), sizes);
    add_score_options(random(), inputs);
    add_masks(random(), inputs);
    inputs.options.num_splits = 1;
    std::vector<std::int64_t> used;
    for (int b = 0; b < 3; ++b) used.push_back(random().between(0, sizes.kv_len));
    inputs.used_k = ints(used);
    // Rows past the used lengths hold NaN and infinity, which must not matter.
    for (std::int64_t b = 0; b < 3; ++b) {
      for (std::int64_t h = 0; h < sizes.kv_heads; ++h) {
        for (std::int64_t j = used[static_cast<std::size_t>(b)]; j < sizes.kv_len; ++j) {
          for (std::int64_t d = 0; d < sizes.head_dim; ++d) {
            inputs.k.set({b, h, j, d}, std::numeric_limits<double>::quiet_NaN());
          }
          for (std::int64_t d = 0; d < sizes.v_dim; ++d) {
            inputs.v.set({b, h, j, d}, std::numeric_limits<double>::infinity());
          }
        }
      }
    }
    const Output output = attend(inputs);
    ASSERT_TRUE(output.status.ok()) << output.status.message();
    for (std::int64_t b = 0; b < 3; ++b) {
      const Output want = attend(single(inputs, b, sizes.q_len, used[static_cast<std::size_t>(b)]));
      ASSERT_TRUE(want.status.ok()) << want.status.message();
      FLASHCORE_EXPECT_SAME_BITS(take(output.out, 0, {b}), want.out);
      FLASHCORE_EXPECT_SAME_BITS(take(output.lse, 0, {b}), want.lse);
    }
  }
}

TEST_P(Lengths, OnlyDifferencesOfPositionsMatter) {
  for (int n = 0; n < rounds(15); ++n) {
    Inputs inputs = draw_call(random(), kernel());
    const std::int64_t batch = inputs.q.size(0), kv_len = inputs.k.size(2);
    std::vector<std::int64_t> q_start, k_start;
    for (std::int64_t b = 0; b < batch; ++b) {
      q_start.push_back(random().between(-3, kv_len));
      k_start.push_back(random().between(-3, 3));
    }
    inputs.q_start = ints(q_start);
    inputs.k_start = ints(k_start);
    const Output want = attend(inputs);
    ASSERT_TRUE(want.status.ok()) << want.status.message();
    EXPECT_EQ(verdict(inputs, want), "");
    for (const std::int64_t shift : {-1000, 7, (1 << 30) - 300}) {
      Inputs shifted = inputs;
      for (std::int64_t b = 0; b < batch; ++b) {
        shifted.q_start.set({b}, static_cast<double>(q_start[static_cast<std::size_t>(b)] + shift));
        shifted.k_start.set({b}, static_cast<double>(k_start[static_cast<std::size_t>(b)] + shift));
      }
      const Output output = attend(shifted);
      ASSERT_TRUE(output.status.ok()) << output.status.message();
      FLASHCORE_EXPECT_SAME(output, want);
    }
  }
}

TEST_P(Lengths, DefaultPositionsAreBottomRight) {
  for (int n = 0; n < rounds(10); ++n) {
    Inputs implied = draw_call(random(), kernel());
    Inputs given = implied;
    const auto batch = static_cast<std::size_t>(implied.q.size(0));
    given.q_start = ints(std::vector<std::int64_t>(batch, implied.k.size(2) - implied.q.size(2)));
    given.k_start = ints(std::vector<std::int64_t>(batch, 0));
    const Output a = attend(implied), b = attend(given);
    ASSERT_TRUE(b.status.ok()) << b.status.message();
    FLASHCORE_EXPECT_SAME(a, b);
  }
}

TEST_P(Lengths, RowsOutsideVarlenSequencesAreNotWritten) {
  Inputs inputs;
  inputs.q = draw_normal(random(), dtype(), {10, 2, 8});
  inputs.k = draw_normal(random(), dtype(), {2, 2, 9, 8});
  inputs.v = draw_normal(random(), dtype(), {2, 2, 9, 8});
  inputs.cu_seqlens_q = ints({2, 5, 8});
  inputs.options.kernel = kernel().id;
  for (const std::int32_t splits : {1, 3}) {
    inputs.options.num_splits = splits;
    const Output output = attend(inputs);
    ASSERT_TRUE(output.status.ok()) << output.status.message();
    const Output untouched = make_output(inputs);
    for (const std::vector<std::int64_t>& rows :
         {std::vector<std::int64_t>{0, 1}, std::vector<std::int64_t>{8, 9}}) {
      FLASHCORE_EXPECT_SAME_BITS(take(output.out, 0, rows), take(untouched.out, 0, rows));
      FLASHCORE_EXPECT_SAME_BITS(take(output.lse, 1, rows), take(untouched.lse, 1, rows));
    }
    EXPECT_EQ(verdict(inputs, output), "");
  }
}

}  // namespace
}  // namespace flashcore::test
