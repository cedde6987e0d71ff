// TMA (sm_90): one thread loads a box of a tensor into shared memory, with the swizzle of
// core/wgmma_layout.h. Elements outside the tensor are zero-filled.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/primitives/memory.cuh"

namespace flashcore::cuda {

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Loads the box at (column, row, head, batch) of a 4-D map; its bytes count towards s_barrier.
__device__ __forceinline__ void tma_load_4d(std::uint32_t s_to, const CUtensorMap& map, int column,
                                            int row, int head, int batch,
                                            std::uint64_t& s_barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(s_to),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(&s_barrier))
      : "memory");
}

/// Makes earlier generic-proxy stores to shared memory visible to wgmma and TMA.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flashcore::cuda
