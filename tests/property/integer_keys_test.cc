// int8 and byte keys under few rows of f16 and bf16. Kernels with integer dot products split rows
// of q into digits: how many depends on the values of a row.
#include <cmath>
#include <limits>

#include "plan/planner.h"
#include "support/kernel_test.h"

namespace flashcore::test {
namespace {

class IntegerKeys : public KernelTest {
 protected:
  /// Random codes: every value, -128 of int8 too.
  Tensor draw_codes(DType dtype, const Shape& shape) {
    Tensor tensor(dtype, shape);
    std::vector<std::uint64_t> bits = tensor.bits();
    for (std::uint64_t& code : bits) code = static_cast<std::uint64_t>(random().between(0, 255));
    tensor.set_bits(bits);
    return tensor;
  }

  /// Rows with small scores, whose elements differ by up to 2^-`octaves`.
  Tensor draw_queries(const Shape& shape, const std::vector<int>& octaves) {
    Tensor q(dtype(), shape);
    for (std::int64_t b = 0; b < shape[0]; ++b) {
      for (std::int64_t h = 0; h < shape[1]; ++h) {
        const int spread = octaves[static_cast<std::size_t>(h) % octaves.size()];
        for (std::int64_t i = 0; i < shape[2]; ++i) {
          for (std::int64_t d = 0; d < shape[3]; ++d) {
            const int exponent = static_cast<int>(random().between(-spread, 0));
            q.set({b, h, i, d}, std::ldexp(random().normal(), exponent - 6));
          }
        }
      }
    }
    return q;
  }

  Inputs draw(const Sizes& s, DType codes, const std::vector<int>& octaves) {
    Inputs inputs;
    inputs.q = draw_queries({s.batch, s.q_heads, s.q_len, s.head_dim}, octaves);
    inputs.k = draw_codes(codes, {s.batch, s.kv_heads, s.kv_len, s.head_dim});
    inputs.v = draw_codes(codes, {s.batch, s.kv_heads, s.kv_len, s.v_dim});
    inputs.options.kernel = kernel().id;
    return inputs;
  }

  DType draw_format() { return random().chance(0.5) ? DType::int8 : DType::u8; }
};

std::vector<const KernelInfo*> kernels_of_16_bit_rows() {
  std::vector<const KernelInfo*> found;
  for (const KernelInfo* kernel : runnable_kernels()) {
    const bool is_16_bit = kernel->dtype == DType::f16 || kernel->dtype == DType::bf16;
    if (is_16_bit && takes_8_bits(*kernel)) found.push_back(kernel);
  }
  return found;
}
INSTANTIATE_TEST_SUITE_P(Kernels, IntegerKeys, testing::ValuesIn(kernels_of_16_bit_rows()),
                         kernel_name);

// Rows of few and many octaves: up to 24 bits, up to 32, and more, which are not integers.
const std::vector<int> kOctaves = {1, 12, 40, 5, 20, 0, 30};

TEST_P(IntegerKeys, EveryNumberOfDigitsIsRight) {
  constexpr std::int64_t kDims[] = {1, 3, 4, 15, 16, 63, 64, 65, 128, 130, 576};
  constexpr std::int64_t kLengths[] = {1, 15, 16, 17, 47, 97, 300};
  for (int n = 0; n < rounds(40); ++n) {
    Sizes s{.batch = 2, .kv_heads = 2};
    s.q_heads = 2 * random().between(1, 7);
    s.q_len = random().between(1, 2);
    s.head_dim = random().pick(kDims);
    s.v_dim = random().pick(kDims);
    s.kv_len = random().pick(kLengths);
    Inputs inputs = draw(s, draw_format(), kOctaves);
    add_score_options(random(), inputs);
    add_masks(random(), inputs);
    const Output out = attend(inputs);
    ASSERT_TRUE(out.status.ok()) << out.status.message();
    EXPECT_EQ(verdict(inputs, out), "") << "head_dim " << s.head_dim << ", keys " << s.kv_len;
  }
}

TEST_P(IntegerKeys, NoRowDependsOnTheDigitsOfOthers) {
  for (int n = 0; n < rounds(10); ++n) {
    const Sizes s{.q_heads = 7, .kv_len = 130, .head_dim = 80, .v_dim = 40};
    const Inputs together = draw(s, draw_format(), kOctaves);
    const Output all = attend(together);
    ASSERT_TRUE(all.status.ok()) << all.status.message();
    for (std::int64_t h = 0; h < s.q_heads; ++h) {
      Inputs alone = together;
      alone.q = take(together.q, 1, {h});
      const Output one = attend(alone);
      FLASHCORE_EXPECT_SAME_BITS(take(all.out, 1, {h}), one.out);
      FLASHCORE_EXPECT_SAME_BITS(take(all.lse, 1, {h}), one.lse);
    }
  }
}

TEST_P(IntegerKeys, ValuesThatAreNotNumbersStayInTheirRows) {
  const double kNan = std::numeric_limits<double>::quiet_NaN();
  const double kInfinity = std::numeric_limits<double>::infinity();
  for (const double value : {kNan, kInfinity, -kInfinity}) {
    Inputs inputs = draw({.q_heads = 6, .kv_len = 40, .head_dim = 70}, DType::int8, {3});
    inputs.q.set({0, 4, 0, 69}, value);
    for (std::int64_t d = 0; d < 70; ++d) inputs.q.set({0, 2, 0, d}, d % 2 == 0 ? 0.0 : -0.0);
    const Output out = attend(inputs);
    ASSERT_TRUE(out.status.ok()) << out.status.message();
    EXPECT_EQ(verdict(inputs, out), "") << value;
  }
}

}  // namespace
}  // namespace flashcore::test
