// Shared memory addresses and stores; loads and an acquire-release counter in global memory.
#pragma once

#include <cstdint>

namespace flashcore::cuda {

__device__ __forceinline__ std::uint32_t shared_address(const void* s_data) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(s_data));
}

__device__ __forceinline__ void store_shared_4(std::uint32_t s_to, std::uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" : : "r"(s_to), "r"(x) : "memory");
}

__device__ __forceinline__ void store_shared_16(std::uint32_t s_to, const std::uint32_t (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(s_to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

/// A load that stays where it is in program order, for example before a wait for a GEMM.
__device__ __forceinline__ std::uint32_t load_global(const std::uint32_t* g_from) {
  std::uint32_t x;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(g_from) : "memory");
  return x;
}

/// atomicInc with acquire-release order: counts up to `last`, wraps to 0, returns the old count. A
/// later caller sees all earlier writes of this thread, and of the threads that this thread
/// synchronized with at a barrier. Much cheaper than two __threadfence().
__device__ __forceinline__ std::uint32_t atomic_inc_acq_rel(std::uint32_t* g_counter,
                                                            std::uint32_t last) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(g_counter), "r"(last)
               : "memory");
  return before;
}

}  // namespace flashcore::cuda
