// cp.async: asynchronous copies from global to shared memory (sm_80).
#pragma once

#include <cstdint>

namespace flashcore::cuda {

/// Copies `bytes` (0 … 16) from global to shared memory asynchronously and zero-fills the rest of
/// the 16 bytes. Both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_16(std::uint32_t s_to, const void* g_from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(s_to), "l"(g_from), "r"(bytes)
               : "memory");
}

/// Copies 16 bytes. The size as an operand costs address arithmetic.
__device__ __forceinline__ void cp_async_16(std::uint32_t s_to, const void* g_from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(s_to), "l"(g_from) : "memory");
}

/// cp_async_16() for 4 bytes; `bytes` is 0 or 4, addresses are multiples of 4.
__device__ __forceinline__ void cp_async_4(std::uint32_t s_to, const void* g_from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :
               : "r"(s_to), "l"(g_from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most `kPending` groups of this thread are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashcore::cuda
