// Fences for the compiler: where it may move code, and what it may assume.
#pragma once

#include <cstdint>

namespace flashcore::cuda {

/// The same value, opaque to the compiler: code that depends on it is not hoisted out of a loop.
/// Addresses kept in registers across a loop cost more than computing them again.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// x of lane 0, known to the compiler as equal in all lanes: values that depend on it, above all
/// matrix descriptors, stay in uniform registers.
__device__ __forceinline__ std::int32_t warp_uniform(std::int32_t x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

/// Keeps the wgmma wait that follows below the code above it. ptxas would hoist the wait over
/// arithmetic that does not touch the accumulators and should overlap the GEMM. It moves nothing
/// across a loop that may not end; `never` is false, which no compiler can know.
__device__ __forceinline__ void keep_wait_below(bool never) {
  while (never) __nanosleep(1);
}

/// The compiler does not move accesses to these registers across this point.
template <typename R, int kCount>
__device__ __forceinline__ void fence_registers(R (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof(R) == 4 && R(0.5) != R(0)) {
      asm volatile("" : "+f"(r[i])::"memory");
    } else {
      asm volatile("" : "+r"(r[i])::"memory");
    }
  }
}

}  // namespace flashcore::cuda
