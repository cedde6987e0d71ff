// The sums of tensor cores: what is cut, and where.
#include "emulator/instructions/tensor_core.h"

#include <gtest/gtest.h>

#include <vector>

#include "emulator/machine/floats.h"
#include "emulator/unit/run_ptx.h"

namespace flashcore::emulator {
namespace {

/// Row 0, column 0 of c + a b.
float sum_of(const TensorCore& core, float c, const std::vector<float>& a,
             const std::vector<float>& b) {
  constexpr int kColumns = 8, kDepth = 32;
  float left[kDepth][16] = {}, right[kDepth][kColumns] = {}, sum[16][kColumns] = {};
  for (std::size_t k = 0; k < a.size(); ++k) left[k][0] = a[k], right[k][0] = b[k];
  sum[0][0] = c;
  add_products(core, static_cast<int>(a.size()), kColumns, left, right, sum);
  return sum[0][0];
}

float sum_of_ones(const TensorCore& core, float c, const std::vector<float>& a) {
  return sum_of(core, c, a, std::vector<float>(a.size(), 1.f));
}

constexpr TensorCore kAmpere = tensor_core(80, TensorFormat::f16, TensorFormat::f16);
constexpr TensorCore kHopper = tensor_core(90, TensorFormat::f16, TensorFormat::f16);
constexpr TensorCore kHopper8 = tensor_core(90, TensorFormat::e4m3, TensorFormat::e4m3);

TEST(TensorCore, CutsAddendsBelowTheLargest) {
  // Beside 1, Ampere keeps bits down to 2^-24 and Hopper to 2^-25. Two units of an f32 above 1.
  EXPECT_EQ(sum_of_ones(kAmpere, 1.f, {0x1p-24f, 0x1p-24f}), 1 + 0x1p-23f);
  EXPECT_EQ(sum_of_ones(kAmpere, 1.f, {0x1.8p-24f, 0x1.8p-24f}), 1 + 0x1p-23f);
  EXPECT_EQ(sum_of_ones(kAmpere, 0x1p10f, {0x1p-15f, 0x1p-15f, 0x1p-15f, 0x1p-15f}), 0x1p10f);
  EXPECT_EQ(sum_of_ones(kHopper, 0x1p10f, {0x1p-15f, 0x1p-15f, 0x1p-15f, 0x1p-15f}),
            0x1p10f + 0x1p-13f);
  // Towards zero, whatever the sign.
  EXPECT_EQ(sum_of_ones(kHopper, 0x1p10f, {-0x1.4p-14f, -0x1.4p-14f, -0x1p10f}), -0x1p-13f);
}

TEST(TensorCore, CutsTheResult) {
  EXPECT_EQ(sum_of_ones(kHopper, 1.f, {0x1.8p-24f}), 1.f);
  EXPECT_EQ(sum_of_ones(kHopper, -1.f, {-0x1.8p-24f}), -1.f);
  EXPECT_EQ(sum_of_ones(kHopper, 1.f, {-0x1p-24f}), 1 - 0x1p-24f);
  EXPECT_EQ(sum_of_ones(kHopper8, 1.f, {0x1.cp-9f, 0x1.cp-9f}), 1 + 0x1.cp-8f);
  EXPECT_EQ(sum_of_ones(kHopper8, 128.f, {0x1.cp-8f, 0x1.cp-8f}), 128.f);
}

TEST(TensorCore, AddsEightOrSixteenAtOnce) {
  // The large value comes last: products of earlier steps have been added without it.
  std::vector<float> values(16, 0x1p-15f);
  values.back() = 2048;
  EXPECT_EQ(sum_of_ones(kHopper, 0.f, values), 2048.f);
  EXPECT_EQ(sum_of_ones(kAmpere, 0.f, values), 2048 + 0x1p-12f);
}

TEST(TensorCore, AlignsProductsByTheExponentsOfTheirFactors) {
  // 1.5 * 1.5 is 2.25, but is aligned as 1.
  EXPECT_EQ(sum_of(kAmpere, 0.f, {1.5f, 0x1p-14f, -1.5f}, {1.5f, 0x1p-10f, 1.5f}), 0x1p-24f);
  // Factors that are subnormal align as the smallest normal number.
  EXPECT_EQ(sum_of(kAmpere, 0.f, {0x1p-24f, 0x1p-24f}, {1.f, 0x1p-14f}), 0x1p-24f + 0x1p-38f);
  EXPECT_EQ(sum_of(kAmpere, 0.f, {0x1p-24f, 0x1p-24f}, {1.f, 0x1p-15f}), 0x1p-24f);
}

TEST(TensorCore, PassesInfinitiesAndNan) {
  EXPECT_EQ(sum_of_ones(kHopper, 1.f, {INFINITY, 1.f}), INFINITY);
  EXPECT_TRUE(std::isnan(sum_of_ones(kHopper, 1.f, {INFINITY, -INFINITY})));
  EXPECT_TRUE(std::isnan(sum_of_ones(kHopper, 1.f, {NAN})));
  EXPECT_EQ(sum_of_ones(kHopper, 0.f, {0.f, -0.f}), 0.f);
}

/// mma.sync of one row: a large product first, then 15 that are cut beside it.
float run_mma(int compute_capability) {
  // Lane 0 holds k = 0, 1 in %r20, k = 8, 9 in %r22; lanes 1 to 3 the other columns of row 0.
  std::vector<std::uint32_t> memory(128);
  const auto pair = [](float low, float high) {
    return static_cast<std::uint32_t>(float_to_half(high)) << 16 | float_to_half(low);
  };
  for (std::uint32_t lane = 0; lane < 32; ++lane) memory[lane] = pair(0x1p-14f, 0x1p-14f);
  memory[0] = pair(2048.f, 0x1p-14f);
  const std::string body = R"(
    ld.global.u32 %r20, [%rd1];
    mov.u32 %r21, 0;
    mov.u32 %r22, )" + std::to_string(pair(0x1p-14f, 0x1p-14f)) +
                           R"(;
    mov.u32 %r23, 0;
    mov.u32 %r24, )" + std::to_string(pair(1.f, 1.f)) +
                           R"(;
    mov.f32 %f0, 0f00000000;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4},
      {%r20, %r21, %r22, %r23}, {%r24, %r24}, {%f0, %f0, %f0, %f0};
    st.global.f32 [%rd1], %f1;)";
  EXPECT_EQ(run_ptx(body, memory, {.compute_capability = compute_capability}), "");
  return std::bit_cast<float>(memory[0]);
}

TEST(TensorCore, MmaAddsAsTheDeviceDoes) {
  // 15 products of 2^-14 beside 2048: Ampere cuts at 2^-13, Hopper at 2^-14 and then at 2^-12.
  EXPECT_EQ(run_mma(80), 2048.f);
  EXPECT_EQ(run_mma(90), 2048 + 0x1.8p-11f);
}

}  // namespace
}  // namespace flashcore::emulator
