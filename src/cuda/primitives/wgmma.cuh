// wgmma m64nNk16 and m64nNk32 (sm_90a): c += a b for a warpgroup, 64 rows, N columns, f32
// accumulators, 16-bit or e4m3 operands. Accumulator register 4 n + r of a lane is register r of
// n-tile n in core/mma_layout.h; warp w of the warpgroup has rows 16 w to 16 w + 15.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flashcore::cuda {

// wgmma is asynchronous: no other instruction may touch its registers between issue and wait.

/// Orders earlier register accesses before the following wgmma.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kPending groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Releases (dec) or requests (inc) registers of a warpgroup.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kN>
struct Wgmma;

// Inline assembly has no loops: macros build operand lists from groups of eight accumulators.
#define FLASHCORE_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASHCORE_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FLASHCORE_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FLASHCORE_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHCORE_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FLASHCORE_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHCORE_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FLASHCORE_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHCORE_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FLASHCORE_R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FLASHCORE_R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FLASHCORE_R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FLASHCORE_R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FLASHCORE_R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FLASHCORE_R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FLASHCORE_R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FLASHCORE_C(how, g)                                                                  \
  how(c[8 * g]), how(c[8 * g + 1]), how(c[8 * g + 2]), how(c[8 * g + 3]), how(c[8 * g + 4]), \
      how(c[8 * g + 5]), how(c[8 * g + 6]), how(c[8 * g + 7])
#define FLASHCORE_NAMES1 FLASHCORE_R0
#define FLASHCORE_ACCUMULATORS1(how) FLASHCORE_C(how, 0)
#define FLASHCORE_NAMES2 FLASHCORE_NAMES1 ", " FLASHCORE_R1
#define FLASHCORE_ACCUMULATORS2(how) FLASHCORE_ACCUMULATORS1(how), FLASHCORE_C(how, 1)
#define FLASHCORE_NAMES3 FLASHCORE_NAMES2 ", " FLASHCORE_R2
#define FLASHCORE_ACCUMULATORS3(how) FLASHCORE_ACCUMULATORS2(how), FLASHCORE_C(how, 2)
#define FLASHCORE_NAMES4 FLASHCORE_NAMES3 ", " FLASHCORE_R3
#define FLASHCORE_ACCUMULATORS4(how) FLASHCORE_ACCUMULATORS3(how), FLASHCORE_C(how, 3)
#define FLASHCORE_NAMES5 FLASHCORE_NAMES4 ", " FLASHCORE_R4
#define FLASHCORE_ACCUMULATORS5(how) FLASHCORE_ACCUMULATORS4(how), FLASHCORE_C(how, 4)
#define FLASHCORE_NAMES6 FLASHCORE_NAMES5 ", " FLASHCORE_R5
#define FLASHCORE_ACCUMULATORS6(how) FLASHCORE_ACCUMULATORS5(how), FLASHCORE_C(how, 5)
#define FLASHCORE_NAMES7 FLASHCORE_NAMES6 ", " FLASHCORE_R6
#define FLASHCORE_ACCUMULATORS7(how) FLASHCORE_ACCUMULATORS6(how), FLASHCORE_C(how, 6)
#define FLASHCORE_NAMES8 FLASHCORE_NAMES7 ", " FLASHCORE_R7
#define FLASHCORE_ACCUMULATORS8(how) FLASHCORE_ACCUMULATORS7(how), FLASHCORE_C(how, 7)
#define FLASHCORE_NAMES9 FLASHCORE_NAMES8 ", " FLASHCORE_R8
#define FLASHCORE_ACCUMULATORS9(how) FLASHCORE_ACCUMULATORS8(how), FLASHCORE_C(how, 8)
#define FLASHCORE_NAMES10 FLASHCORE_NAMES9 ", " FLASHCORE_R9
#define FLASHCORE_ACCUMULATORS10(how) FLASHCORE_ACCUMULATORS9(how), FLASHCORE_C(how, 9)
#define FLASHCORE_NAMES11 FLASHCORE_NAMES10 ", " FLASHCORE_R10
#define FLASHCORE_ACCUMULATORS11(how) FLASHCORE_ACCUMULATORS10(how), FLASHCORE_C(how, 10)
#define FLASHCORE_NAMES12 FLASHCORE_NAMES11 ", " FLASHCORE_R11
#define FLASHCORE_ACCUMULATORS12(how) FLASHCORE_ACCUMULATORS11(how), FLASHCORE_C(how, 11)
#define FLASHCORE_NAMES13 FLASHCORE_NAMES12 ", " FLASHCORE_R12
#define FLASHCORE_ACCUMULATORS13(how) FLASHCORE_ACCUMULATORS12(how), FLASHCORE_C(how, 12)
#define FLASHCORE_NAMES14 FLASHCORE_NAMES13 ", " FLASHCORE_R13
#define FLASHCORE_ACCUMULATORS14(how) FLASHCORE_ACCUMULATORS13(how), FLASHCORE_C(how, 13)
#define FLASHCORE_NAMES15 FLASHCORE_NAMES14 ", " FLASHCORE_R14
#define FLASHCORE_ACCUMULATORS15(how) FLASHCORE_ACCUMULATORS14(how), FLASHCORE_C(how, 14)
#define FLASHCORE_NAMES16 FLASHCORE_NAMES15 ", " FLASHCORE_R15
#define FLASHCORE_ACCUMULATORS16(how) FLASHCORE_ACCUMULATORS15(how), FLASHCORE_C(how, 15)

// i0 … i5: operand numbers after the accumulators; how: "=f" or "+f".
#define FLASHCORE_WGMMA_SS(shape, groups, how, accumulate, orders, i0, i1)        \
  asm volatile("wgmma.mma_async.sync.aligned." shape " {" FLASHCORE_NAMES##groups \
               "}, %" #i0 ", %" #i1 ", " accumulate ", 1, 1" orders ";"           \
               : FLASHCORE_ACCUMULATORS##groups(how)                              \
               : "l"(a), "l"(b)                                                   \
               : "memory")
#define FLASHCORE_WGMMA_RS(shape, groups, orders, i0, i1, i2, i3, i4, i5)                       \
  asm volatile(                                                                                 \
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #i5                                \
      ", 0;\n"                                                                                  \
      "wgmma.mma_async.sync.aligned." shape " {" FLASHCORE_NAMES##groups                        \
      "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", accumulate, 1, 1" orders ";\n}\n" \
      : FLASHCORE_ACCUMULATORS##groups("+f")                                                    \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))   \
      : "memory")
#define FLASHCORE_WGMMA_FRESH_RS(shape, groups, i0, i1, i2, i3, i4)                \
  asm volatile("wgmma.mma_async.sync.aligned." shape " {" FLASHCORE_NAMES##groups  \
               "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", 0, 1, 1;\n" \
               : FLASHCORE_ACCUMULATORS##groups("=f")                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                \
               : "memory")

/// Tag type of e4m3 operands.
struct E4m3 {};

// kAccumulate = false: c = a b, and the old c need not stay in registers.
//   ss             a and b in shared memory, both K-major: Q K^T
//   ss_mn_major    a and b in shared memory, both MN-major: 16-bit dS K from dS^T
//   rs_b_mn_major  a in registers, b in shared memory, MN-major: 16-bit P V
//   rs_b_k_major   a in registers, b in shared memory, K-major: e4m3 P V
#define FLASHCORE_WGMMA(n, groups, i0, i1, i2, i3, i4, i5)                                        \
  template <>                                                                                     \
  struct Wgmma<n> {                                                                               \
    template <typename T, bool kAccumulate>                                                       \
    __device__ __forceinline__ static void ss(float (&c)[n / 2], std::uint64_t a,                 \
                                              std::uint64_t b) {                                  \
      if constexpr (std::is_same_v<T, E4m3> && kAccumulate) {                                     \
        FLASHCORE_WGMMA_SS("m64n" #n "k32.f32.e4m3.e4m3", groups, "+f", "1", "", i0, i1);         \
      } else if constexpr (std::is_same_v<T, E4m3>) {                                             \
        FLASHCORE_WGMMA_SS("m64n" #n "k32.f32.e4m3.e4m3", groups, "=f", "0", "", i0, i1);         \
      } else if constexpr (std::is_same_v<T, __half> && kAccumulate) {                            \
        FLASHCORE_WGMMA_SS("m64n" #n "k16.f32.f16.f16", groups, "+f", "1", ", 0, 0", i0, i1);     \
      } else if constexpr (std::is_same_v<T, __half>) {                                           \
        FLASHCORE_WGMMA_SS("m64n" #n "k16.f32.f16.f16", groups, "=f", "0", ", 0, 0", i0, i1);     \
      } else if constexpr (kAccumulate) {                                                         \
        FLASHCORE_WGMMA_SS("m64n" #n "k16.f32.bf16.bf16", groups, "+f", "1", ", 0, 0", i0, i1);   \
      } else {                                                                                    \
        FLASHCORE_WGMMA_SS("m64n" #n "k16.f32.bf16.bf16", groups, "=f", "0", ", 0, 0", i0, i1);   \
      }                                                                                           \
    }                                                                                             \
    template <typename T, bool kAccumulate>                                                       \
    __device__ __forceinline__ static void ss_mn_major(float (&c)[n / 2], std::uint64_t a,        \
                                                       std::uint64_t b) {                         \
      if constexpr (std::is_same_v<T, __half> && kAccumulate) {                                   \
        FLASHCORE_WGMMA_SS("m64n" #n "k16.f32.f16.f16", groups, "+f", "1", ", 1, 1", i0, i1);     \
      } else if constexpr (std::is_same_v<T, __half>) {                                           \
        FLASHCORE_WGMMA_SS("m64n" #n "k16.f32.f16.f16", groups, "=f", "0", ", 1, 1", i0, i1);     \
      } else if constexpr (kAccumulate) {                                                         \
        FLASHCORE_WGMMA_SS("m64n" #n "k16.f32.bf16.bf16", groups, "+f", "1", ", 1, 1", i0, i1);   \
      } else {                                                                                    \
        FLASHCORE_WGMMA_SS("m64n" #n "k16.f32.bf16.bf16", groups, "=f", "0", ", 1, 1", i0, i1);   \
      }                                                                                           \
    }                                                                                             \
    template <typename T>                                                                         \
    __device__ __forceinline__ static void rs_b_mn_major(float (&c)[n / 2],                       \
                                                         const std::uint32_t (&a)[4],             \
                                                         std::uint64_t b, bool accumulate) {      \
      if constexpr (std::is_same_v<T, __half>) {                                                  \
        FLASHCORE_WGMMA_RS("m64n" #n "k16.f32.f16.f16", groups, ", 1", i0, i1, i2, i3, i4, i5);   \
      } else {                                                                                    \
        FLASHCORE_WGMMA_RS("m64n" #n "k16.f32.bf16.bf16", groups, ", 1", i0, i1, i2, i3, i4, i5); \
      }                                                                                           \
    }                                                                                             \
    template <bool kAccumulate>                                                                   \
    __device__ __forceinline__ static void rs_b_k_major(float (&c)[n / 2],                        \
                                                        const std::uint32_t (&a)[4],              \
                                                        std::uint64_t b) {                        \
      if constexpr (kAccumulate) {                                                                \
        constexpr bool accumulate = true;                                                         \
        FLASHCORE_WGMMA_RS("m64n" #n "k32.f32.e4m3.e4m3", groups, "", i0, i1, i2, i3, i4, i5);    \
      } else {                                                                                    \
        FLASHCORE_WGMMA_FRESH_RS("m64n" #n "k32.f32.e4m3.e4m3", groups, i0, i1, i2, i3, i4);      \
      }                                                                                           \
    }                                                                                             \
  };
FLASHCORE_WGMMA(32, 2, 16, 17, 18, 19, 20, 21)
FLASHCORE_WGMMA(64, 4, 32, 33, 34, 35, 36, 37)
FLASHCORE_WGMMA(96, 6, 48, 49, 50, 51, 52, 53)
FLASHCORE_WGMMA(112, 7, 56, 57, 58, 59, 60, 61)
FLASHCORE_WGMMA(128, 8, 64, 65, 66, 67, 68, 69)
FLASHCORE_WGMMA(160, 10, 80, 81, 82, 83, 84, 85)
FLASHCORE_WGMMA(176, 11, 88, 89, 90, 91, 92, 93)
FLASHCORE_WGMMA(192, 12, 96, 97, 98, 99, 100, 101)
FLASHCORE_WGMMA(208, 13, 104, 105, 106, 107, 108, 109)
FLASHCORE_WGMMA(256, 16, 128, 129, 130, 131, 132, 133)

#undef FLASHCORE_R0
#undef FLASHCORE_R1
#undef FLASHCORE_R2
#undef FLASHCORE_R3
#undef FLASHCORE_R4
#undef FLASHCORE_R5
#undef FLASHCORE_R6
#undef FLASHCORE_R7
#undef FLASHCORE_R8
#undef FLASHCORE_R9
#undef FLASHCORE_R10
#undef FLASHCORE_R11
#undef FLASHCORE_R12
#undef FLASHCORE_R13
#undef FLASHCORE_R14
#undef FLASHCORE_R15
#undef FLASHCORE_NAMES1
#undef FLASHCORE_ACCUMULATORS1
#undef FLASHCORE_NAMES2
#undef FLASHCORE_ACCUMULATORS2
#undef FLASHCORE_NAMES3
#undef FLASHCORE_ACCUMULATORS3
#undef FLASHCORE_NAMES4
#undef FLASHCORE_ACCUMULATORS4
#undef FLASHCORE_NAMES5
#undef FLASHCORE_ACCUMULATORS5
#undef FLASHCORE_NAMES6
#undef FLASHCORE_ACCUMULATORS6
#undef FLASHCORE_NAMES7
#undef FLASHCORE_ACCUMULATORS7
#undef FLASHCORE_NAMES8
#undef FLASHCORE_ACCUMULATORS8
#undef FLASHCORE_NAMES9
#undef FLASHCORE_ACCUMULATORS9
#undef FLASHCORE_NAMES10
#undef FLASHCORE_ACCUMULATORS10
#undef FLASHCORE_NAMES11
#undef FLASHCORE_ACCUMULATORS11
#undef FLASHCORE_NAMES12
#undef FLASHCORE_ACCUMULATORS12
#undef FLASHCORE_NAMES13
#undef FLASHCORE_ACCUMULATORS13
#undef FLASHCORE_NAMES14
#undef FLASHCORE_ACCUMULATORS14
#undef FLASHCORE_NAMES15
#undef FLASHCORE_ACCUMULATORS15
#undef FLASHCORE_NAMES16
#undef FLASHCORE_ACCUMULATORS16
#undef FLASHCORE_C
#undef FLASHCORE_WGMMA_SS
#undef FLASHCORE_WGMMA_RS
#undef FLASHCORE_WGMMA_FRESH_RS
#undef FLASHCORE_WGMMA

}  // namespace flashcore::cuda
