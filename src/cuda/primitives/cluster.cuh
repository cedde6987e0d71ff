// Thread block clusters (sm_90): co-scheduled CTAs that write to each other's shared memory.
#pragma once

#include <cstdint>

#include "cuda/primitives/mbarrier.cuh"

namespace flashcore::cuda {

#if __CUDA_ARCH__ >= 900
inline constexpr bool kHasClusters = true;
#else
inline constexpr bool kHasClusters = false;
#endif

/// Relaxed: publishes initialized and fenced mbarriers, but no other writes of this thread.
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

/// Waits until all threads of the cluster have arrived or exited.
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// Address of s_data in CTA `rank` of the cluster.
__device__ __forceinline__ std::uint32_t cluster_address(const void* s_data, int rank) {
  std::uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(s_data)), "r"(rank));
  return address;
}

// Asynchronous stores to another CTA. Their bytes count towards an mbarrier of that CTA; a wait on
// it makes the data visible. The storing CTA may exit before they complete.

__device__ __forceinline__ void store_cluster(std::uint32_t to, const float (&x)[4],
                                              std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
      "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_cluster(std::uint32_t to, const float (&x)[2],
                                              std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          to),
      "f"(x[0]), "f"(x[1]), "r"(barrier)
      : "memory");
}

}  // namespace flashcore::cuda
