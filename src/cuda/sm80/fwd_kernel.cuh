// Attention forward by mma.sync (sm_80 and up): O = softmax(scale Q K^T) V in one kernel, for
// prefill and decode, with every option.
//
// One step of the mainloop: KV tile i, pipelines of n = kStages stages.
//
//   waits      K(i)                           V(i)
//   cp.async   V(i+n-1)                       K(i+n)
//   MMA              | S = Q K(i)^T |                                    | O += P V(i) |
//   ALU                              mods, mask     P = softmax(S), rescale O
//
//   grid    one CTA per (query tile, KV head, batch, split). Query heads that share K and V share a
//           CTA (PackGQA): row r of a KV head is query r / group of head r % group
//   CTA     kWarpsM × kWarpsN warps. A warp has 8, 16 or 32 rows of the tile and, of each step,
//           tile_k / kWarpsN keys. The epilogue reduces over the warps that share rows
//   paths   fast path: scores are only scaled and masked by position, rows fill head_dim, the
//           output has the format of the inputs. Large tiles, and small ones in a kernel of their
//           own, add a boolean mask. General path: every option
//
//   phase      file
//   prologue   work_tile.cuh, load.cuh, load_kv8.cuh (Q and scales of 8-bit K/V)
//   mainloop   mainloop.cuh, plain_steps.cuh (no masks), mainloop_swap_ab.cuh (up to 8 rows);
//              mma.cuh, dequant.cuh (8-bit K/V), score.cuh, softmax.cuh
//   epilogue   epilogue.cuh, output.cuh
//   split-KV   combine.cuh (last CTA, through the workspace), cluster_combine.cuh (CTAs of a
//              cluster), cluster_combine_warps.cuh (warps of a cluster). The roles are templates in
//              core/sm80_roles.h, so that a model on the CPU runs the same lines (tests/protocol)
//
//   smem (config.cuh)                 shape                        type
//   q                                 [tile_q, head_dim]           16-bit, swizzled
//   k, v                              [kStages][tile_k, head_dim]  16-bit or 8-bit, swizzled
//   staged, in place of q, k, v       [kWarpsN][tile_q, head_dim]  f32: O before the reduction
//   row_stats                         [threads][rows of a thread]  f32 maximum, sum
//   k_scale, v_scale (8-bit K/V)      [kStages][tile_k]            f32
//   cluster buffer, behind the rest   core/cluster_buffer.h        f32
#pragma once

#include <cuda_runtime.h>

#include "cuda/primitives/pdl.cuh"
#include "cuda/sm80/process_tile.cuh"

namespace flashcore::cuda::sm80 {

template <typename C, bool kFastPath>
__device__ __forceinline__ void run_cta(const AttentionParams& p) {
  extern __shared__ __align__(128) unsigned char s_bytes[];
  pdl_launch_dependents();
  process_tile<C, kFastPath>(*reinterpret_cast<SharedStorage<C>*>(s_bytes), p);
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kMinCtas)
    fwd_kernel(const __grid_constant__ AttentionParams p) {
  run_cta<C, true>(p);
}

/// The general path is a kernel of its own: in one kernel, ptxas would merge common code of the two
/// paths and spill registers.
template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kMinCtas)
    fwd_kernel_general(const __grid_constant__ AttentionParams p) {
  run_cta<C, false>(p);
}

/// The fast path with a boolean mask. Large tiles read masks in every kernel.
template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kMinCtas)
    fwd_kernel_masked(const __grid_constant__ AttentionParams p) {
  run_cta<MaskConfig<C>, true>(p);
}

/// The kernel for calls whose only option is a boolean mask. Tiles of 512 keys are seldom chosen
/// for a mask, and have none of their own.
template <typename C>
void (*masked_kernel())(AttentionParams) {
  if constexpr (C::kLargeTile || C::kKv8 || C::kTileK >= 512) {
    return &fwd_kernel_general<C>;
  } else {
    return &fwd_kernel_masked<C>;
  }
}

}  // namespace flashcore::cuda::sm80
