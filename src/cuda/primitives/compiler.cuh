// Compiler fences: they restrict code motion or give the compiler a fact. Most emit no instruction.
#pragma once

#include <cstdint>

namespace flashcore::cuda {

/// Hides the value's origin from the compiler, which then cannot hoist code that depends on it out
/// of a loop. Recomputing addresses is cheaper than keeping them in registers across the loop.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// Broadcasts x from lane 0. The compiler then knows that it is warp-uniform and keeps dependent
/// values, such as matrix descriptors, in uniform registers.
__device__ __forceinline__ std::int32_t warp_uniform(std::int32_t x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

/// Keeps the next wgmma wait below the code above this call. ptxas would hoist the wait over
/// arithmetic that should overlap the GEMM, but it moves nothing across a potentially infinite
/// loop. `never` is a runtime value that is always false.
__device__ __forceinline__ void keep_wait_below(bool never) {
  while (never) __nanosleep(1);
}

/// Runs code where it stands. ptxas would sink exponentials below the next wgmma wait, though the
/// GEMM should hide them, but it moves nothing out of a branch. `never` as above.
template <typename Code>
__device__ __forceinline__ void run_in_place(bool never, Code code) {
  if (!never) code();
}

/// Prevents the compiler from moving accesses to these registers across this point.
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
