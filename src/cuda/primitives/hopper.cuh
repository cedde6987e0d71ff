// Thin wrappers of Hopper's asynchronous machinery (sm_90a): tensor copies (TMA), register
// reallocation, and what orders wgmma.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/primitives/mbarrier.cuh"

namespace flashcore::cuda {

// TMA: one thread asks for a box of a tensor; it comes with the swizzle of core/wgmma_layout.h, and
// elements outside of the tensor as zeros.

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Box at (column, row, head, batch) of a 4-D map; its bytes count towards s_barrier.
__device__ __forceinline__ void tma_load_4d(std::uint32_t s_to, const CUtensorMap& map, int column,
                                            int row, int head, int batch,
                                            std::uint64_t& s_barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(s_to),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(&s_barrier))
      : "memory");
}

/// Shared memory written by ordinary stores before this can be read by wgmma and TMA.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Four 8×8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(std::uint32_t s_row, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(s_row), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Named barriers, 1 … 15, among `threads` threads.

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// A warpgroup gives registers back, or takes them.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// wgmma runs beside its warpgroup: registers it reads or writes are its own from issue to wait.

/// Ordinary accesses to registers come before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kPending of the latest groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Where the program text has it, here is a wait for products: ptxas would move it up, over
/// arithmetic that does not touch them and that is to run beside them. It moves nothing across a
/// loop that may not end; `never` is false, in a way that no compiler can know.
__device__ __forceinline__ void keep_wait_below(bool never) {
  while (never) __nanosleep(1);
}

/// The compiler may not move accesses to these registers across this point.
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
