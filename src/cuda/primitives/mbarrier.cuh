// mbarriers in shared memory (sm_90): a phase completes after all expected arrivals and bytes.
#pragma once

#include <cstdint>

#include "cuda/primitives/memory.cuh"

namespace flashcore::cuda {

__device__ __forceinline__ void init_barrier(std::uint64_t& s_barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&s_barrier)),
               "r"(arrivals)
               : "memory");
}

/// Makes initialized barriers visible to TMA.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(std::uint64_t& s_barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&s_barrier))
               : "memory");
}

/// Arrives and adds `bytes` of asynchronous copies to the phase.
__device__ __forceinline__ void arrive_expect_tx(std::uint64_t& s_barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&s_barrier)),
      "r"(bytes)
      : "memory");
}

/// Arrives once for the warp, after all of its lanes have reached this call.
__device__ __forceinline__ void arrive_once_per_warp(std::uint64_t& s_barrier, int lane) {
  __syncwarp();
  if (lane == 0) arrive(s_barrier);
}

/// Waits until the phase with this parity completes. A new barrier is in phase 0: a wait for parity
/// 1 returns immediately.
__device__ __forceinline__ void wait(std::uint64_t& s_barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(&s_barrier)),
      "r"(parity)
      : "memory");
}

/// Tests without blocking whether the phase with this parity is complete. An early test, followed
/// by wait() only if it fails, hides the latency of the query.
__device__ __forceinline__ bool test_wait(std::uint64_t& s_barrier, std::uint32_t parity) {
  std::uint32_t complete;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(complete)
      : "r"(shared_address(&s_barrier)), "r"(parity)
      : "memory");
  return complete != 0;
}

}  // namespace flashcore::cuda
