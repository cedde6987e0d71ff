// Bulk copies and additions from shared to global memory (sm_90), and counters that order those of
// several CTAs.
#pragma once

#include <cstdint>

#include "cuda/primitives/memory.cuh"

namespace flashcore::cuda {

/// Both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_store(float* g_to, const float* s_from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(g_to),
               "r"(shared_address(s_from)), "r"(bytes)
               : "memory");
}

/// Adds to global memory. Elements are rounded to f32, one by one.
__device__ __forceinline__ void bulk_add(float* g_to, const float* s_from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(g_to),
      "r"(shared_address(s_from)), "r"(bytes)
      : "memory");
}

/// Starts to read global memory into L2.
__device__ __forceinline__ void prefetch_l2(const float* g_from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(g_from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until shared memory of this thread's copies may be written again.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// Waits until this thread's copies are complete.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/// Orders this thread's accesses to global memory of both proxies.
__device__ __forceinline__ void fence_global_proxy() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

/// True if the counter has this value. Later accesses then see what was written before.
__device__ __forceinline__ bool count_is(const std::uint32_t* g_counter, std::uint32_t value) {
  std::uint32_t x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(g_counter) : "memory");
  return x == value;
}

__device__ __forceinline__ void wait_for_count(const std::uint32_t* g_counter,
                                               std::uint32_t value) {
  while (!count_is(g_counter, value)) __nanosleep(64);
}

/// Sets the counter after all earlier writes of this thread.
__device__ __forceinline__ void set_count(std::uint32_t* g_counter, std::uint32_t value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(g_counter), "r"(value) : "memory");
}

}  // namespace flashcore::cuda
