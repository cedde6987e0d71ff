// Gradients of attention on Hopper (wgmma, TMA, sm_90a), in the split form: dK and dV from tiles of
// keys, dQ from tiles of queries, in one persistent, warp-specialized kernel. No tile adds to
// another one's results, so every sum has a fixed order.
//
//            A1   A2   B1   B2   of a step
//   dkdv     K    V    Q    dO   Sᵀ = K Qᵀ, dPᵀ = V dOᵀ, dV += Pᵀ dO, dK += dZᵀ Q
//   dq       Q    dO   K    V    S = Q Kᵀ, dP = dO Vᵀ, dQ += dZ K
//
// Above head_dim 192, dK and dV of a tile do not fit the registers together. Then dk and dv tiles
// take the place of dkdv tiles, and Sᵀ is computed for both.
//
//   P = 2^(S scale log2(e) - base), dS = P (dP - delta), dZ = dS times the softcap's derivative;
//   base and delta of a query row come from common/backward.cu
//
// One step of a warpgroup (core::consume_bwd_steps), dkdv; S' and dP' belong to the next step:
//
//   tensor     | S    dP               |            | dV    dK    S'          | dP'
//   warpgroup  |      | P = exp2(S)    | dZ, pack   | issue dV, dK, S'  wait  | P' ...
//
//   role        threads                       registers  file
//   scheduler   thread 32 of warpgroup 0      40         bwd_producer.cuh: fetches work tiles
//   producer    thread 0                      40         bwd_producer.cuh: A and B by TMA
//   tail        warp 2                        40         bwd_producer.cuh: row statistics, zeros
//   inspector   warp 3                        40         bwd_inspector.cuh: finds NaN in A
//   consumer    2 warpgroups, 64 rows of A    232        bwd_mainloop.cuh, bwd_score.cuh,
//                                                        bwd_epilogue.cuh
//   grid        one CTA per SM; its work tiles are dkdv tiles first, then dq tiles; or dq, dk, dv
//   smem        bwd_config.cuh: A1 [128, head_dim], A2 [128, v_dim]; a ring of steps, B1 [step,
//               head_dim] and B2 [step, v_dim], 128B swizzle; mbarriers, row statistics, the tile
//               queue
//   barriers    core/sm90_bwd_pipeline.h; the roles are templates in core/sm90_bwd_roles.h
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/bwd_inspector.cuh"
#include "cuda/sm90/bwd_mainloop.cuh"

namespace flashcore::cuda::sm90 {

/// The consumers' side of the work tiles of one kind.
template <typename C, typename Steps>
__device__ __forceinline__ void consume_bwd_phase(BwdStorage<C>& s, const BwdParams& params,
                                                  BwdQueueState& queue, core::BwdTileState& a) {
  using Consumer = std::conditional_t<Steps::kOfKeys, KeysConsumer<C, Steps>, DqConsumer<C, Steps>>;
  Consumer warp(s, params);
  core::consume_bwd_tiles<Steps>(warp, queue, a);
}

/// The consumers' side of all work tiles.
template <typename C, typename... Steps>
__device__ __forceinline__ void consume_bwd(BwdStorage<C>& s, const BwdParams& params,
                                            core::BwdPhases<Steps...>) {
  BwdQueueState queue;
  core::BwdTileState a;
  (consume_bwd_phase<C, Steps>(s, params, queue, a), ...);
}

/// The warpgroup that feeds the consumers.
template <typename C>
__device__ __forceinline__ void feed_bwd(BwdStorage<C>& s, const BwdParams& params) {
  const int warp = warp_uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    BwdProducer<C> producer{{{s, params}}};
    core::produce_bwd(producer, typename C::Phases{});
  } else if (threadIdx.x == 32) {
    BwdSchedulerThread<C> scheduler{{{s, params}}};
    core::schedule_tiles(scheduler);
  } else if (warp == 2) {
    BwdTailWarp<C> tail{{{s, params}, static_cast<int>(threadIdx.x % 32)}};
    core::prepare_bwd(tail, typename C::Phases{});
  } else if (warp == 3) {
    BwdInspector<C> inspector{{{s, params}, static_cast<int>(threadIdx.x % 32)}};
    core::inspect_bwd(inspector, typename C::Phases{});
  }
}

template <typename C>
__device__ __forceinline__ void run_bwd_cta(const BwdParams& params) {
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  BwdStorage<C>& s = *reinterpret_cast<BwdStorage<C>*>(s_bytes);
  if (threadIdx.x == 0) init_bwd_barriers(s);
  __syncthreads();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<C::kShape.producer_registers()>();
    feed_bwd<C>(s, params);
  } else {
    setmaxnreg_inc<C::kShape.consumer_registers()>();
    consume_bwd<C>(s, params, typename C::Phases{});
  }
}

/// For calls without score modifications.
template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    bwd_kernel(const __grid_constant__ BwdParams params) {
  run_bwd_cta<C>(params);
}

/// For calls with a softcap, ALiBi or a scale that is not positive.
template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    bwd_kernel_general(const __grid_constant__ BwdParams params) {
  run_bwd_cta<typename C::WithOptions>(params);
}

}  // namespace flashcore::cuda::sm90
