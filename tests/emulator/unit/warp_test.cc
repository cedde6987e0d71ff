// Divergence, collectives and single instructions.
#include <gtest/gtest.h>

#include <bit>
#include <numeric>

#include "emulator/unit/run_ptx.h"

namespace flashcore::emulator {
namespace {

using Words = std::vector<std::uint32_t>;

TEST(Divergence, LoopsOfDifferentLengthsMeetAgain) {
  Words memory(32);
  // Sums 0 … tid in a loop; the ballot afterwards needs all lanes together.
  const std::string report = run_ptx(R"(
    mov.u32 %r1, 0;
    mov.u32 %r2, 0;
  again:
    add.u32 %r2, %r2, %r1;
    add.u32 %r1, %r1, 1;
    setp.le.u32 %p0, %r1, %r0;
    @%p0 bra again;
    vote.sync.ballot.b32 %r3, 1, -1;
    setp.ne.u32 %p1, %r3, -1;
    @%p1 mov.u32 %r2, 999;
    st.global.u32 [%rd1], %r2;)",
                                     memory);
  EXPECT_EQ(report, "");
  for (std::uint32_t lane = 0; lane < 32; ++lane) EXPECT_EQ(memory[lane], lane * (lane + 1) / 2);
}

TEST(Divergence, ALaneMayWaitForAnotherOneOfItsWarp) {
  Words memory(32, 0);
  // Even lanes poll until the odd lanes, whose code is behind the loop, have stored.
  const std::string report = run_ptx(R"(
    and.b32 %r1, %r0, 1;
    setp.eq.u32 %p0, %r1, 1;
    @%p0 bra odd;
  poll:
    ld.volatile.global.u32 %r2, [%rd1+4];
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra poll;
    bra.uni end;
  odd:
    mov.u32 %r2, 7;
    st.volatile.global.u32 [%rd1], %r2;
  end:
    st.global.u32 [%rd1], %r2;)",
                                     memory);
  EXPECT_EQ(report, "");
  EXPECT_EQ(memory, Words(32, 7));
}

TEST(Collectives, ShuffleOfHalfWarps) {
  Words memory(32);
  std::iota(memory.begin(), memory.end(), 100);
  // Segments of 16 lanes: clamp 31, segment mask 16.
  const std::string report = run_ptx(R"(
    ld.global.u32 %r1, [%rd1];
    shfl.sync.bfly.b32 %r2, %r1, 8, 4127, -1;
    shfl.sync.up.b32 %r3|%p0, %r1, 1, 4096, -1;
    shfl.sync.idx.b32 %r4, %r1, 3, 4127, -1;
    shl.b32 %r3, %r3, 8;
    shl.b32 %r4, %r4, 16;
    or.b32 %r2, %r2, %r3;
    or.b32 %r2, %r2, %r4;
    @!%p0 mov.u32 %r2, 0;
    st.global.u32 [%rd1], %r2;)",
                                     memory);
  EXPECT_EQ(report, "");
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    const std::uint32_t want = (100 + (lane ^ 8)) | (99 + lane) << 8 | (103 + lane / 16 * 16) << 16;
    EXPECT_EQ(memory[lane], lane % 16 == 0 ? 0 : want) << lane;
  }
}

/// One instruction on constants: the result in %r1.
std::uint32_t result_of(const std::string& instructions) {
  Words memory(32);
  EXPECT_EQ(run_ptx(instructions + "\nst.global.u32 [%rd1], %r1;", memory), "");
  return memory[5];
}

TEST(Instructions, BitFields) {
  EXPECT_EQ(result_of("mov.u32 %r2, 0x44332211; mov.u32 %r3, 0x887766f5; "
                      "prmt.b32 %r1, %r2, %r3, 0xc460;"),
            0xfff57711u);
  EXPECT_EQ(result_of("mov.u32 %r2, 0x0000f680; bfe.s32 %r1, %r2, 8, 8;"), 0xfffffff6u);
  EXPECT_EQ(result_of("mov.u32 %r2, 0x0000f680; bfe.u32 %r1, %r2, 8, 8;"), 0xf6u);
  EXPECT_EQ(result_of("mov.u32 %r2, 5; mov.u32 %r3, -1; bfi.b32 %r1, %r2, %r3, 4, 8;"),
            0xfffff05fu);
  EXPECT_EQ(result_of("mov.u32 %r2, 12; mov.u32 %r3, 10; lop3.b32 %r1, %r2, %r3, 6, 0x96;"),
            12u ^ 10u ^ 6u);
  EXPECT_EQ(result_of("mov.u32 %r2, 0x80000001; shf.l.wrap.b32 %r1, %r2, %r2, 4;"), 0x18u);
  EXPECT_EQ(result_of("mov.u32 %r2, 1; shl.b32 %r1, %r2, 40;"), 0u);
}

TEST(Instructions, Conversions) {
  const auto pair = [](const std::string& to, float high, float low) {
    char text[160];
    std::snprintf(text, sizeof text,
                  "mov.f32 %%f1, 0f%08x; mov.f32 %%f2, 0f%08x; cvt.rn.%s %%r1, %%f1, %%f2;",
                  std::bit_cast<std::uint32_t>(high), std::bit_cast<std::uint32_t>(low),
                  to.c_str());
    return result_of(text);
  };
  EXPECT_EQ(pair("f16x2.f32", 1.f, -2.f), 0x3c00c000u);
  EXPECT_EQ(pair("f16x2.f32", 1e6f, 2049.f), 0x7c006800u);               // infinity; a tie to even
  EXPECT_EQ(pair("bf16x2.f32", 1.00390625f, 1.01171875f), 0x3f803f82u);  // ties
  const auto fp8 = [&](float high, float low) {
    char text[200];
    std::snprintf(text, sizeof text,
                  "mov.f32 %%f1, 0f%08x; mov.f32 %%f2, 0f%08x; cvt.rn.satfinite.e4m3x2.f32 %%rs1, "
                  "%%f1, %%f2; cvt.u32.u16 %%r1, %%rs1;",
                  std::bit_cast<std::uint32_t>(high), std::bit_cast<std::uint32_t>(low));
    return result_of(text);
  };
  EXPECT_EQ(fp8(0.f, 1.f), 0x0038u);
  EXPECT_EQ(fp8(-1000.f, 0.001953125f), 0xfe01u);  // saturated; the smallest subnormal
  EXPECT_EQ(result_of("mov.f32 %f1, 0f4f800000; cvt.rzi.s32.f32 %r1, %f1;"), 0x7fffffffu);
}

}  // namespace
}  // namespace flashcore::emulator
