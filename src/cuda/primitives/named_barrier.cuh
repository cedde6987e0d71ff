// Named barriers: bar.sync and bar.arrive for a subset of a CTA's threads. Each kernel family
// enumerates its barriers.
#pragma once

namespace flashcore::cuda {

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flashcore::cuda
