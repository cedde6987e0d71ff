// ldmatrix, mma.sync and wgmma against plain products.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "emulator/machine/floats.h"
#include "emulator/unit/run_ptx.h"

namespace flashcore::emulator {
namespace {

using Words = std::vector<std::uint32_t>;

TEST(Matrix, MmaOfTilesFromSharedMemory) {
  // A (16 x 16) and B (8 x 16, a row per column of the product) as f16, then the product as f32.
  constexpr int kA = 0, kB = 128, kC = 192;
  Words memory(kC + 128);
  const auto a = [](int m, int k) { return static_cast<float>((m * 7 + k * 3) % 11 - 5); };
  const auto b = [](int k, int n) { return static_cast<float>((k * 5 + n * 2) % 13 - 6); };
  const auto pair = [](float low, float high) {
    return static_cast<std::uint32_t>(float_to_half(high)) << 16 | float_to_half(low);
  };
  for (int k = 0; k < 16; k += 2) {
    for (int m = 0; m < 16; ++m) memory[kA + m * 8 + k / 2] = pair(a(m, k), a(m, k + 1));
    for (int n = 0; n < 8; ++n) memory[kB + n * 8 + k / 2] = pair(b(k, n), b(k + 1, n));
  }
  // cp.async the 192 words to shared memory, 6 per lane. Rows have 32 bytes.
  const std::string body = R"(
    // 192 words to shared memory; rows have 32 bytes.
    mov.u32 %r1, smem;
    shl.b32 %r2, %r0, 2;
    add.u32 %r1, %r1, %r2;
    mov.u32 %r10, 0;
  copy:
    cp.async.ca.shared.global [%r1], [%rd1], 4;
    add.u32 %r1, %r1, 128;
    add.s64 %rd1, %rd1, 128;
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p0, %r10, 6;
    @%p0 bra copy;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    // A: lane l has row l % 16, columns 8 (l / 16); B: lane l % 16 has row l % 8, columns 8 (l / 8 % 2).
    mov.u32 %r1, smem;
    and.b32 %r2, %r0, 15;
    shl.b32 %r2, %r2, 5;
    and.b32 %r3, %r0, 16;
    add.u32 %r2, %r2, %r3;
    add.u32 %r2, %r2, %r1;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r2];
    and.b32 %r2, %r0, 7;
    shl.b32 %r2, %r2, 5;
    and.b32 %r3, %r0, 8;
    shl.b32 %r3, %r3, 1;
    add.u32 %r2, %r2, %r3;
    add.u32 %r2, %r2, %r1;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r24, %r25}, [%r2+512];
    mov.f32 %f0, 0f00000000;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4},
      {%r20, %r21, %r22, %r23}, {%r24, %r25}, {%f0, %f0, %f0, %f0};
    // c0, c1: row l / 4, columns 2 (l % 4); c2, c3: 8 rows below. 8 floats in a row.
    mul.wide.u32 %rd2, %r0, 8;
    add.s64 %rd2, %rd0, %rd2;
    st.global.v2.f32 [%rd2+768], {%f1, %f2};
    st.global.v2.f32 [%rd2+1024], {%f3, %f4};)";
  EXPECT_EQ(run_ptx(body, memory), "");
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      float want = 0;
      for (int k = 0; k < 16; ++k) want += a(m, k) * b(k, n);
      EXPECT_EQ(std::bit_cast<float>(memory[kC + m * 8 + n]), want) << m << ' ' << n;
    }
  }
}

/// m64n8k16 of ones: 16 everywhere. Stores accumulator 0 of every thread.
Words wgmma_of_ones(const std::string& before_store) {
  Words memory(128);
  const std::string body = R"(
    mov.u32 %r1, smem;
    shl.b32 %r2, %r0, 2;
    add.u32 %r1, %r1, %r2;
    mov.u32 %r10, 0;
    mov.u32 %r3, 0x3c003c00;
  fill:
    st.shared.u32 [%r1], %r3;
    add.u32 %r1, %r1, 512;
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p0, %r10, 32;
    @%p0 bra fill;
    bar.sync 0;
    mov.u32 %r1, smem;
    shr.u32 %r1, %r1, 4;
    cvt.u64.u32 %rd2, %r1;
    or.b64 %rd2, %rd2, 0x4000004000000000;
    mov.f32 %f1, 0f00000000;
    mov.f32 %f2, %f1;
    mov.f32 %f3, %f1;
    mov.f32 %f4, %f1;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd2, %rd2, 1, 1, 1, 0, 0;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd2, %rd2, 1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
)" + before_store + "\nst.global.f32 [%rd1], %f1;";
  EXPECT_EQ(run_ptx(body, memory, {.threads = 128}), "");
  return memory;
}

TEST(Wgmma, ResultsOfAChainArriveAtTheWait) {
  for (std::uint32_t x : wgmma_of_ones("wgmma.wait_group.sync.aligned 0;")) {
    EXPECT_EQ(std::bit_cast<float>(x), 32.f);
  }
}

TEST(Wgmma, AccumulatorsInFlightAreNan) {
  for (std::uint32_t x : wgmma_of_ones("wgmma.wait_group.sync.aligned 1;")) {
    EXPECT_TRUE(std::isnan(std::bit_cast<float>(x)));
  }
}

TEST(Wgmma, OperandsAreReadAtTheWait) {
  // Overwriting an operand in flight is a bug that must show.
  const std::string overwrite = R"(
    mov.u32 %r1, smem;
    mov.u32 %r3, 0;
    st.shared.u32 [%r1], %r3;
    bar.sync 0;
    wgmma.wait_group.sync.aligned 0;)";
  bool differs = false;
  for (std::uint32_t x : wgmma_of_ones(overwrite)) differs |= std::bit_cast<float>(x) != 32.f;
  EXPECT_TRUE(differs);
}

}  // namespace
}  // namespace flashcore::emulator
