// Attention forward on Hopper's tensor cores (wgmma, sm_90a): softmax(Q K^T) V in one kernel, for
// many query rows.
//
//   grid     one block per SM, each working through its items: tile_q query rows of one head, or of
//            some that share K and V
//   block    one warpgroup deals out work and loads (a thread each; by TMA), the others compute, 64
//            rows each, with the first one's registers
//   steps    tile_k keys at a time through rings of kStages K and V tiles
//   overlap  the products of a step are issued before the softmax of the step before is needed:
//            S' = Q K'^T and O += P V run while the warpgroups, in turns, do their exponentials
//   codes    e4m3 inputs have a simpler step (codes.cuh) and values to transpose (transpose.cuh)
//   scores   stay in registers: S is the accumulator of Q K^T and, packed to 16 bits, the A operand
//            of P V
//   roles, barriers  core/sm90_roles.h, core/sm90_pipeline.h: who waits for whom; a model on the
//            CPU runs the same lines. Shared memory: config.cuh
#pragma once

#include <cuda_runtime.h>

#include "cuda/primitives/hopper.cuh"
#include "cuda/primitives/wgmma.cuh"
#include "cuda/sm90/config.cuh"
#include "cuda/sm90/consumer.cuh"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/mainloop_fp8.cuh"
#include "cuda/sm90/producer.cuh"
#include "cuda/sm90/score.cuh"
#include "cuda/sm90/softmax.cuh"
#include "cuda/sm90/tail_split.cuh"
#include "cuda/sm90/transpose_v.cuh"

namespace flashcore::cuda::sm90 {

/// O += P V, or = P V, begun.
template <typename C>
__device__ __forceinline__ void issue_pv(AccO<C>& acc_o,
                                         const std::uint32_t (&a)[C::kTileK / 16][4],
                                         SharedStorage<C>& s, int stage, bool accumulate) {
  using V = typename C::KeyTile;
  const std::uint64_t v = core::matrix_descriptor(shared_address(s.v[stage]), V::kPanelBytes);
#pragma unroll
  for (int step = 0; step < C::kTileK / 16; ++step) {
    Wgmma<C::kHeadDim>::template rs_b_mn_major<typename C::Element>(
        acc_o, a[step], core::advance(v, V::mn_offset(step)), accumulate || step > 0);
  }
  wgmma_commit();
}

/// A consumer warp of 16-bit tensors.
template <typename C, bool kFastPath>
struct Consumer : ConsumerWarp<C> {
  using Pipeline = typename C::Pipeline;
  using Position = typename ConsumerWarp<C>::Position;
  static constexpr bool kProbesVEarly = C::kSchedule.probe_v_early;
  const float unit_log2;  // of the scores in the softmax: a plain problem's are not scaled
  std::uint32_t a[C::kTileK / 16][4];

  __device__ __forceinline__ Consumer(SharedStorage<C>& s, const Params& params)
      : ConsumerWarp<C>(s, params, Thread<C>(threadIdx.x, params.heads)),
        unit_log2(kFastPath && !params.call.fault.is(InjectedFault::scale_ignored)
                      ? params.call.softmax_scale_log2
                      : static_cast<float>(core::kLog2E)) {
    this->states = init_row_stats();
  }

  __device__ __forceinline__ void softmax(const Position& at, bool needs_mask) {
    const AttentionParams& p = this->params.call;
    apply_mods_and_mask<C, kFastPath>(this->acc_s, this->t, p, this->item(at.item), at.tile,
                                      needs_mask, [&](int) { return score_scale(p); });
    sm90::softmax<C, kFastPath>(this->acc_s, this->states, this->rescale, unit_log2, p.fault);
  }
  __device__ __forceinline__ void pack_probabilities() {
    sm90::pack_probabilities<C>(a, this->acc_s);
  }

  __device__ __forceinline__ bool v_tail_dirty() const { return this->params.v_tail_dirty; }
  __device__ __forceinline__ bool has_tail(TileQueueState item, std::int32_t tile) const {
    return keys_left(item, tile) < C::kTileK;
  }
  /// Zero-fills V rows past the last key: P is 0 there, but 0 * NaN is NaN. Every warpgroup does it
  /// for itself: not all of them may need the tile.
  __device__ __forceinline__ void zero_v_tail(TileQueueState item, std::int32_t tile,
                                              typename Pipeline::KvState place) const {
    constexpr int kPieces = core::kPanelRowBytes / 16;
    const int keys = keys_left(item, tile);
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < C::kTileK * kPieces; i += 128) {
      if (i / kPieces < keys) continue;
#pragma unroll 1
      for (int panel = 0; panel < C::KeyTile::kPanels; ++panel) {
        unsigned char* s_panel = this->s.v[place.stage()] + panel * C::KeyTile::kPanelBytes;
        *reinterpret_cast<uint4*>(s_panel + i * 16) = {};
      }
    }
    fence_async_proxy();
    named_barrier_sync(core::v_tail_barrier(this->t.group), core::kVTailThreads);
  }

  __device__ __forceinline__ void issue_pv(typename Pipeline::KvState place, bool accumulates) {
    wgmma_fence();
    sm90::issue_pv<C>(this->acc_o, a, this->s, place.stage(), accumulates);
  }
  __device__ __forceinline__ void fence_acc_o() { fence_registers(this->acc_o); }
  __device__ __forceinline__ bool rescales_any() const { return sm90::rescales_any(this->rescale); }
  __device__ __forceinline__ void keep_wait_below() const {
    cuda::keep_wait_below(this->params.order.items < 0);
  }
  __device__ __forceinline__ void rescale_output() {
    sm90::rescale_output<C>(this->acc_o, this->rescale);
  }

  __device__ __forceinline__ void stash_row_stats() {
    sm90::stash_row_stats<C>(this->s, this->states, this->t,
                             kFastPath ? score_scale(this->params.call) : 1.f);
  }
  __device__ __forceinline__ void reset_row_stats() { this->states = init_row_stats(); }

  __device__ __forceinline__ void write_item(TileQueueState place) {
    const WorkTile& item = this->item(place);
    if constexpr (C::kPackGqa) {
      if (item.part >= 0 &&
          !reduce_tail_splits<C>(this->acc_o, this->s, this->params, item, this->t))
        return;
    }
    store_output<C>(this->acc_o, this->s, this->params.call, item, this->t);
  }

 private:
  __device__ __forceinline__ int keys_left(TileQueueState item, std::int32_t tile) const {
    return this->item(item).seq.kv_len - tile * C::kTileK;
  }
};

template <typename C, bool kFastPath>
__device__ __forceinline__ void compute(SharedStorage<C>& s, const Params& params) {
  if constexpr (C::kFp8) {
    Fp8Consumer<C, kFastPath> warp(s, params);
    core::consume_fp8(warp);
  } else {
    Consumer<C, kFastPath> warp(s, params);
    core::consume(warp);
  }
}

template <typename C>
__device__ __forceinline__ void init_barriers(SharedStorage<C>& s, bool too_few) {
  constexpr core::Sm90Traits kShape = C::kShape;
  int next = 0;
#pragma unroll
  for (int i = 0; i < core::kSm90Barriers; ++i) {
    const auto barrier = static_cast<Sm90Barrier>(i);
    const int slots = core::sm90_barrier(kShape, barrier).slots;
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      init_barrier(s.barriers[next++], core::initial_arrivals(kShape, barrier, too_few));
    }
  }
  fence_barrier_init();
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    fwd_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  SharedStorage<C>& s = *reinterpret_cast<SharedStorage<C>*>(s_bytes);
  pdl_launch_dependents();
  if (threadIdx.x == 0) init_barriers<C>(s, params.call.fault.is(InjectedFault::arrivals_too_few));
  __syncthreads();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<C::kProducerRegisters>();
    if (threadIdx.x == 0) {
      prefetch_tensor_map(params.q);
      prefetch_tensor_map(params.k);
      prefetch_tensor_map(params.v);
      pdl_wait();
      ProducerThread<C> producer{{{s, params}}};
      core::produce(producer);
    }
    if (threadIdx.x == 32) {
      pdl_wait();
      SchedulerThread<C> scheduler{{{s, params}}};
      core::schedule_tiles(scheduler);
    }
    if constexpr (C::kFp8) {
      if (threadIdx.x >= 64) {
        TransposerWarp<C> transposer{
            {s, params}, warp_uniform(threadIdx.x / 32) - 2, static_cast<int>(threadIdx.x % 32)};
        core::transpose_values(transposer);
      }
    }
  } else {
    setmaxnreg_inc<C::kConsumerRegisters>();
    if (params.fast_path) {
      compute<C, true>(s, params);
    } else {
      compute<C, false>(s, params);
    }
  }
}

}  // namespace flashcore::cuda::sm90
