// The order of keys, split-KV, and the linearity of the output in V.
#include <cmath>

#include "support/kernel_test.h"

namespace flashcore::test {
namespace {

class Keys : public KernelTest {};
FLASHCORE_FOR_EACH_KERNEL(Keys);

Tensor doubled_values(const Tensor& tensor) {
  std::vector<double> values = tensor.values();
  for (double& x : values) x *= 2;
  return tensor_of(tensor.dtype(), tensor.shape(), values);
}

TEST_P(Keys, OrderDoesNotMatter) {
  for (int n = 0; n < rounds(10); ++n) {
    const Sizes sizes = draw_sizes(random(), kernel());
    Inputs inputs = draw_inputs(random(), kernel(), sizes);
    // Only options that do not depend on positions. Bias and mask are permuted with the keys.
    if (random().chance(0.5)) inputs.options.softcap = 5;
    if (random().chance(0.5)) {
      inputs.bias =
          draw_normal(random(), DType::f32, {1, sizes.q_heads, sizes.q_len, sizes.kv_len});
    }
    if (random().chance(0.5)) {
      inputs.mask = draw_mask(random(), {sizes.batch, 1, sizes.q_len, sizes.kv_len});
    }
    const auto order = draw_permutation(random(), sizes.kv_len);
    Inputs permuted = inputs;
    permuted.k = take(inputs.k, 2, order);
    permuted.v = take(inputs.v, 2, order);
    if (inputs.bias.given()) permuted.bias = take(inputs.bias, 3, order);
    if (inputs.mask.given()) permuted.mask = take(inputs.mask, 3, order);
    const Output output = attend(permuted);
    // The oracle gets the keys in their original order.
    EXPECT_EQ(verdict(inputs, output), "");
    EXPECT_EQ(verdict(inputs, attend(inputs)), "");
  }
}

TEST_P(Keys, EverySplitCountIsRight) {
  for (int n = 0; n < rounds(6); ++n) {
    Inputs inputs = draw_call(random(), kernel());
    Output whole = attend(inputs);
    for (std::int32_t splits = 1; splits <= 9; ++splits) {
      inputs.options.num_splits = splits;
      const Output output = attend(inputs);
      EXPECT_EQ(verdict(inputs, output), "") << splits << " splits";
      if (splits == 1) {
        FLASHCORE_EXPECT_SAME(output, whole);
      }
      EXPECT_LE(output.plan.splits, splits);
    }
  }
}

TEST_P(Keys, SplitCountAboveKeysIsClamped) {
  Inputs inputs = draw_call(random(), kernel());
  inputs.options.num_splits = 1 << 20;
  EXPECT_EQ(verdict(inputs, attend(inputs)), "");
}

TEST_P(Keys, PlannerSplitsLongSequences) {
  Sizes sizes{.batch = 1,
              .q_heads = 2,
              .kv_heads = 1,
              .q_len = 1,
              .kv_len = 3000,
              .head_dim = 16,
              .v_dim = 16};
  Inputs inputs = draw_inputs(random(), kernel(), sizes);
  const Output output = attend(inputs);
  EXPECT_GT(output.plan.splits, 1);
  EXPECT_EQ(verdict(inputs, output), "");
}

TEST_P(Keys, ConstantVIsReturned) {
  for (int n = 0; n < rounds(20); ++n) {
    const Sizes sizes = draw_sizes(random(), kernel());
    Inputs inputs = draw_inputs(random(), kernel(), sizes, random().chance(0.3) ? 10.0 : 1.0);
    inputs.options.num_splits = static_cast<std::int32_t>(random().between(0, 3));
    const double constant = random().chance(0.5) ? -2.5 : 0.375;
    inputs.v.fill(constant);
    const Output output = attend(inputs);
    ASSERT_TRUE(output.status.ok()) << output.status.message();
    const double unit = dtype() == DType::f64    ? 0x1p-52
                        : dtype() == DType::f16  ? 0x1p-11
                        : dtype() == DType::bf16 ? 0x1p-8
                                                 : 0x1p-24;
    const double step = dtype() == DType::f64 ? 0x1p-52 : 0x1p-24;
    const double tolerance = std::fabs(constant) *
                             (unit + 4 * step * (1 + std::sqrt(static_cast<double>(sizes.kv_len))));
    for (const double x : output.out.values()) ASSERT_NEAR(x, constant, tolerance);
    EXPECT_EQ(verdict(inputs, output), "");
  }
}

TEST_P(Keys, DoubledVDoublesTheOutputBitForBit) {
  for (int n = 0; n < rounds(20); ++n) {
    Inputs inputs = draw_call(random(), kernel());
    inputs.options.num_splits = static_cast<std::int32_t>(random().between(1, 3));
    Inputs doubled = inputs;
    doubled.v = doubled_values(inputs.v);
    // f32 outputs, so that no subnormal of a narrow format is involved.
    const Output a = attend(inputs, {.out = wide(dtype())});
    const Output b = attend(doubled, {.out = wide(dtype())});
    ASSERT_TRUE(a.status.ok()) << a.status.message();
    FLASHCORE_EXPECT_SAME_BITS(doubled_values(a.out), b.out);
    FLASHCORE_EXPECT_SAME_BITS(a.lse, b.lse);
  }
}

TEST_P(Keys, OutputIsAdditiveInV) {
  for (int n = 0; n < rounds(15); ++n) {
    Inputs inputs = draw_call(random(), kernel());
    // Small integers: their sum is exact in every format.
    Inputs first = inputs, second = inputs, sum = inputs;
    const std::size_t count = inputs.v.values().size();
    std::vector<double> a, b, both;
    for (std::size_t i = 0; i < count; ++i) {
      a.push_back(static_cast<double>(random().between(-50, 50)));
      b.push_back(static_cast<double>(random().between(-50, 50)));
      both.push_back(a.back() + b.back());
    }
    first.v = tensor_of(dtype(), inputs.v.shape(), a);
    second.v = tensor_of(dtype(), inputs.v.shape(), b);
    sum.v = tensor_of(dtype(), inputs.v.shape(), both);
    const Output of_a = attend(first, {.out = wide(dtype())});
    const Output of_b = attend(second, {.out = wide(dtype())});
    const Output of_sum = attend(sum, {.out = wide(dtype())});
    ASSERT_TRUE(of_sum.status.ok()) << of_sum.status.message();
    // Each output is within its bound of the exact result, and the exact result is linear.
    const auto bound_a = out_bounds(first, of_a), bound_b = out_bounds(second, of_b),
               bound = out_bounds(sum, of_sum);
    const auto out_a = of_a.out.values(), out_b = of_b.out.values(), out = of_sum.out.values();
    for (std::size_t i = 0; i < out.size(); ++i) {
      ASSERT_NEAR(out[i], out_a[i] + out_b[i], bound_a[i] + bound_b[i] + bound[i]);
    }
    FLASHCORE_EXPECT_SAME_BITS(of_a.lse, of_b.lse);
    FLASHCORE_EXPECT_SAME_BITS(of_a.lse, of_sum.lse);
  }
}

}  // namespace
}  // namespace flashcore::test
