// Barriers in shared memory (mbarrier, sm_90): a phase ends when all expected arrivals and all
// expected bytes have come.
#pragma once

#include <cstdint>

#include "cuda/primitives/ptx.cuh"

namespace flashcore::cuda {

__device__ __forceinline__ void init_barrier(std::uint64_t& s_barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&s_barrier)),
               "r"(arrivals)
               : "memory");
}

/// Initialised barriers can be seen by the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(std::uint64_t& s_barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&s_barrier))
               : "memory");
}

/// Arrives and announces copies of this many bytes.
__device__ __forceinline__ void arrive_expect_tx(std::uint64_t& s_barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&s_barrier)),
      "r"(bytes)
      : "memory");
}

/// All lanes of the warp have come here, and are one arrival.
__device__ __forceinline__ void arrive_once_per_warp(std::uint64_t& s_barrier, int lane) {
  __syncwarp();
  if (lane == 0) arrive(s_barrier);
}

/// Waits for the end of the phase of this parity. A fresh barrier is in phase 0: waiting for
/// parity 1 returns at once.
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

/// Whether that phase is complete. To ask early, and wait later only where it was not, hides the
/// time that the answer takes.
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
