// Named barriers: bar.sync and bar.arrive among some threads of a CTA. Each kernel family numbers
// its own in an enum.
#pragma once

namespace flashcore::cuda {

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flashcore::cuda
