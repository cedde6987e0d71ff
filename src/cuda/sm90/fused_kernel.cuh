// Gradients of attention on Hopper (wgmma, TMA, sm_90a), in the fused form: one persistent,
// warp-specialized kernel over key tiles, with five products a step. Its dQ tiles are added to
// memory in f32 in ascending order of the keys, so the sum has one order.
//
//   S = Q Kᵀ, dP = dO Vᵀ, dV += Pᵀ dO, dK += dZᵀ Q (transposed, keys as rows), dQ += dZ K
//   P = 2^(S scale log2(e) - base), dZ = P (dP - delta); base and delta of a query row come from
//   common/backward.cu
//
// One step of a warpgroup (core::consume_fused_steps); S', P', dP' and dZ' belong to the next one.
// At a bar it waits for its GEMMs:
//
//   dV, dZ -> smem, dK, S' | the other's dZ, dQ | dQ -> smem, dP', P' | dZ'
//
//   role        threads                       registers  file
//   scheduler   thread 32 of warpgroup 0      40         fused_producer.cuh: takes tickets
//   producer    thread 0                      40         bwd_producer.cuh: A and B by TMA
//   tail        warp 2                        40         bwd_producer.cuh: row statistics, zeros
//   store       thread 96                     40         fused_producer.cuh: adds dQ tiles
//   consumer    2 warpgroups, 64 keys each    232        fused_mainloop.cuh
//   grid        one CTA per SM; core/sm90_fused_order.h has the order of the work tiles
//   smem        fused_config.cuh: K, V [128, head_dim]; two stages of Q, dO [64, head_dim]; two
//               slots of dZᵀ [128, 64] and of dQ (f32); mbarriers, row statistics, the tile queue
//   barriers    core/sm90_fused_pipeline.h; the roles are templates in core/sm90_fused_roles.h
#pragma once

#include <cuda_runtime.h>

#include "cuda/primitives/pdl.cuh"
#include "cuda/sm90/fused_mainloop.cuh"
#include "cuda/sm90/fused_producer.cuh"

namespace flashcore::cuda::sm90 {

/// The warpgroup beside the consumers.
template <typename C>
__device__ __forceinline__ void feed_fused(BwdStorage<C>& s, const FusedParams& params) {
  const int warp = warp_uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    BwdProducer<C> producer{{{s, params}}};
    core::produce_fused(producer);
  } else if (threadIdx.x == 32) {
    FusedScheduler<C> scheduler{{{{s, params}}}, params, {}};
    core::schedule_tiles(scheduler);
  } else if (warp == 2) {
    BwdTailWarp<C> tail{{{s, params}, static_cast<int>(threadIdx.x % 32)}};
    core::prepare_fused(tail);
  } else if (threadIdx.x == 96) {
    FusedStoreThread<C> store{{{s, params}}, params};
    core::store_fused(store);
  }
}

/// For calls without score modifications that want dq, dk and dv.
template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    fused_kernel(const __grid_constant__ FusedParams params) {
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  BwdStorage<C>& s = *reinterpret_cast<BwdStorage<C>*>(s_bytes);
  pdl_launch_dependents();  // finish_dq
  if (threadIdx.x == 0) init_bwd_barriers(s);
  __syncthreads();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<C::kShape.producer_registers()>();
    feed_fused<C>(s, params);
  } else {
    setmaxnreg_inc<C::kShape.consumer_registers()>();
    FusedConsumer<C> consumer(s, params);
    core::consume_fused(consumer);
  }
}

/// Waits for all additions to a dQ tile, whose keys are `keys`.
__device__ __forceinline__ void wait_for_dq(const FusedParams& params, const core::KeyRange& keys,
                                            std::int64_t tile) {
  const core::Fault fault = params.call.fwd.fault;
  if (fault.is(InjectedFault::last_query_tile_dropped) ||
      fault.is(InjectedFault::group_last_head_only)) {
    return pdl_wait();  // the main kernel omits additions
  }
  if (threadIdx.x == 0) {
    const std::int32_t first = keys.begin / core::kFusedTileRows;
    const std::int32_t last = (keys.end - 1) / core::kFusedTileRows;
    wait_for_count(params.turns + tile, static_cast<std::uint32_t>(last - first + 1));
    fence_global_proxy();
  }
  __syncthreads();
}

template <typename C>
__device__ __forceinline__ void finish_dq_tile(const FusedParams& params) {
  const core::BackwardParams& p = params.call;
  const AttentionParams& f = p.fwd;
  const auto head_index = static_cast<std::int32_t>(blockIdx.x / f.q_tiles);
  const auto tile = static_cast<std::int32_t>(blockIdx.x % f.q_tiles);
  const std::int32_t b = head_index / f.q_heads, h = head_index % f.q_heads;
  const core::SeqInfo seq = f.is_varlen ? core::seq_info_of(f, b) : core::dense_seq_info(f);
  const std::int32_t first = tile * core::kFusedStepRows;
  const int rows = min(core::kFusedStepRows, seq.q_len - first);
  if (rows <= 0) return;
  float acc[C::kHeadDim / 2] = {};
  const core::KeyRange keys = core::keys_of_dq_tile(seq.mask, seq.q_len, tile);
  const bool has_keys = !keys.empty();
  if (has_keys) {
    const std::int64_t dq_tile = core::partial_tile(f, b, h, seq.q_row, tile);
    wait_for_dq(params, keys, dq_tile);
    const auto* const g_own =
        reinterpret_cast<const float4*>(static_cast<const float*>(p.dq_partials) +
                                        dq_tile * C::kDqFloats) +
        threadIdx.x;
#pragma unroll
    for (int i = 0; i < C::kHeadDim / 8; ++i) {
      const float4 x = __ldcs(g_own + 128 * i);
      acc[4 * i] = x.x, acc[4 * i + 1] = x.y, acc[4 * i + 2] = x.z, acc[4 * i + 3] = x.w;
    }
  }
  const float ds_scale = C::kScalesDs ? core::ds_unit(p, b, h / p.group) : 1.f;
  const bool unscaled = f.fault.is(InjectedFault::dq_scale_missing);
  const Thread<C> t(static_cast<int>(threadIdx.x) + 128);  // of the first consumer warpgroup
  const std::int64_t row0 = core::row_offset(p.dq_strides, b, h, std::int64_t{seq.q_row} + first);
  store_gradient<C>(acc, {p.dq, p.dq_element, row0, p.dq_strides.row, has_keys ? rows : 0, rows},
                    f.head_dim, (unscaled ? 1.f : static_cast<float>(p.scale)) / ds_scale, t);
}

/// Writes dq from the sums of all key tiles. A CTA of 128 threads has a dQ tile; their order is
/// (batch, query head, tile). CTAs start on SMs that the main kernel no longer needs, and each
/// waits for its own tile.
template <typename C>
__global__ void __launch_bounds__(128) finish_dq(const __grid_constant__ FusedParams params) {
  finish_dq_tile<C>(params);
  // This kernel must not end before the main kernel: the next one in the stream waits for this one
  // alone. One CTA that waits is enough, and the others leave their SM.
  if (blockIdx.x == gridDim.x - 1) pdl_wait();
}

}  // namespace flashcore::cuda::sm90
