// The 16-bit mainloop: the GEMMs of a step and the consumer warps. core::consume has the order of
// the step, softmax.cuh and score.cuh its arithmetic.
#pragma once

#include "cuda/primitives/tma.cuh"
#include "cuda/sm90/alibi.cuh"
#include "cuda/sm90/barriers.cuh"
#include "cuda/sm90/bias.cuh"
#include "cuda/sm90/boolean_mask.cuh"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/key_ranges.cuh"
#include "cuda/sm90/score.cuh"
#include "cuda/sm90/softcap.cuh"
#include "cuda/sm90/softmax.cuh"

namespace flashcore::cuda::sm90 {

/// Issues S = Q K^T: [64, tile_k] = [64, head_dim] x [tile_k, head_dim]^T.
template <typename C>
__device__ __forceinline__ void issue_qk(AccS<C>& acc_s, SharedStorage<C>& s, int q_slot,
                                         int stage) {
  using Q = typename C::QueryTile;
  using K = typename C::KeyTile;
  const std::uint64_t q = core::matrix_descriptor(shared_address(s.q[q_slot]), 0);
  const std::uint64_t k = core::matrix_descriptor(shared_address(s.k[stage]), 0);
  using Gemm = Wgmma<C::kTileK>;
  Gemm::template ss<typename C::Operand, false>(acc_s, q, k);
#pragma unroll
  for (int step = 1; step < C::kGemmSteps; ++step) {
    Gemm::template ss<typename C::Operand, true>(acc_s, core::advance(q, Q::k_offset(step)),
                                                 core::advance(k, K::k_offset(step)));
  }
  wgmma_commit();
}

/// Issues O += P V, or O = P V: [64, head_dim] += [64, tile_k] x [tile_k, head_dim].
template <typename C>
__device__ __forceinline__ void issue_pv(AccO<C>& acc_o,
                                         const std::uint32_t (&p_frag)[C::kTileK / 16][4],
                                         SharedStorage<C>& s, int stage, bool accumulate) {
  using V = typename C::KeyTile;
  const std::uint64_t v = core::matrix_descriptor(shared_address(s.v[stage]), V::kPanelBytes);
#pragma unroll
  for (int step = 0; step < C::kTileK / 16; ++step) {
    Wgmma<C::kHeadDim>::template rs_b_mn_major<typename C::Element>(
        acc_o, p_frag[step], core::advance(v, V::mn_offset(step)), accumulate || step > 0);
  }
  wgmma_commit();
}

/// Base of the 16-bit and the fp8 consumer warp.
template <typename C>
struct ConsumerWarp : RoleWarp<C> {
  using Pipeline = typename C::Pipeline;
  using Iterator = core::KvTileIterator<Pipeline>;
  static constexpr bool kPingPong = C::kSchedule.ping_pong;
  static constexpr bool kRecountsTile = C::kRecountsTile;
  const Thread<C> t;
  AccS<C> acc_s;
  AccO<C> acc_o;
  RowStats row_stats;
  float rescale[2];

  __device__ __forceinline__ ConsumerWarp(SharedStorage<C>& s, const Params& params,
                                          const Thread<C>& thread)
      : RoleWarp<C>{s, params}, t(thread) {}

  __device__ __forceinline__ int group() const { return t.group; }

  template <Sm90Barrier kBarrier, typename State>
  __device__ __forceinline__ void arrive(const State& state) const {
    arrive_once_per_warp(this->s.template barrier<kBarrier>(state.stage()), t.lane);
  }

  __device__ __forceinline__ void ping_pong_wait() const {
    sync(core::ping_pong_barrier(t.group), core::kPingPongThreads);
  }
  __device__ __forceinline__ void ping_pong_arrive() const {
    sm90::arrive(core::ping_pong_barrier((t.group + 1) % C::kConsumers), core::kPingPongThreads);
  }

  /// True if some row does not see all keys of the tile.
  __device__ __forceinline__ bool needs_mask(const Iterator& it) const {
    return !this->work(it.queue).unmasked_tiles[t.group].contains(it.tile);
  }

  __device__ __forceinline__ void issue_qk(typename Pipeline::QStage q_stage,
                                           typename Pipeline::KvState k_state, const Iterator&) {
    wgmma_fence();
    sm90::issue_qk<C>(acc_s, this->s, q_stage.slot(), k_state.stage());
  }
  template <int kPending>
  __device__ __forceinline__ void wgmma_wait() const {
    cuda::wgmma_wait<kPending>();
  }
  __device__ __forceinline__ void fence_acc_s() { fence_registers(acc_s); }
};

/// The 16-bit consumer warp.
template <typename C, Path kPath>
struct Consumer : ConsumerWarp<C> {
  static constexpr bool kFastPath = is_fast(kPath), kMasked = is_masked(kPath);
  static constexpr bool kBiased = is_biased(kPath), kStagesBias = kPath == Path::biased;
  using Pipeline = typename C::Pipeline;
  using Iterator = typename ConsumerWarp<C>::Iterator;
  static constexpr bool kProbesVEarly = C::kSchedule.probe_v_early;
  const float unit_log2;  // fast path: exponent of 2 per unit of acc_s
  std::uint32_t p_frag[C::kTileK / 16][4];
  const std::uint32_t* g_mask;  // the thread's first row of the packed mask
  std::uint32_t mask_bits[2];   // of its two rows, for the next step
  std::conditional_t<kStagesBias, StagedBias<C>, NoBias<C>> bias;

  __device__ __forceinline__ Consumer(SharedStorage<C>& s, const Params& params)
      : ConsumerWarp<C>(s, params, Thread<C>(threadIdx.x, params.heads)),
        unit_log2(params.call.fault.is(InjectedFault::scale_ignored)
                      ? static_cast<float>(core::kLog2E)
                      : params.call.softmax_scale_log2),
        bias(s, this->t) {
    this->row_stats = init_row_stats();
  }

  __device__ __forceinline__ bool needs_mask(const Iterator& it) {
    if constexpr (kMasked) {
      const WorkTile& work = this->work(it.queue);
      if (!kBitsAhead || it.tile == work.first_tile) {
        g_mask = mask_row<C>(this->params.mask, work, this->t);
        load_mask_bits<C>(mask_bits, g_mask, this->params.mask, it.tile);
      }
    }
    if constexpr (kStagesBias) {
      const WorkTile& work = this->work(it.queue);
      if (it.tile == work.first_tile) {
        bias.begin(this->params, work, this->t);
        bias.load(this->params, work, this->t, it.tile);
      }
    }
    return ConsumerWarp<C>::needs_mask(it);
  }

  __device__ __forceinline__ void softmax(const Iterator& it, bool needs_mask) {
    const Params& params = this->params;
    const core::Fault fault = params.call.fault;
    if constexpr (kBiased) {
      add_bias(it);
      hide_keys(it, needs_mask);
      online_softmax<C>(this->acc_s, this->row_stats, this->rescale, NaturalExponent{}, fault);
      return;
    }
    if constexpr (kFastPath) {
      hide_keys(it, needs_mask);
      online_softmax<C>(this->acc_s, this->row_stats, this->rescale, LinearExponent{unit_log2},
                        fault);
      return;
    }
    if (C::kAddsAlibi && params.adds_alibi && adds_alibi(it, needs_mask)) return;
    if (C::kCapsExponents && params.caps_exponents && caps_exponents(it, needs_mask)) return;
    apply_score_mods<C>(this->acc_s, this->t, params, this->work(it.queue), it.tile,
                        [&](int) { return params.score_scale; });
    hide_keys(it, needs_mask);
    online_softmax<C>(this->acc_s, this->row_stats, this->rescale, Log2Exponent{}, fault);
  }
  __device__ __forceinline__ void pack_p() { sm90::pack_p<C>(p_frag, this->acc_s); }

  __device__ __forceinline__ bool v_tail_dirty() const { return this->params.v_tail_dirty; }
  __device__ __forceinline__ bool has_tail(TileQueueState queue, std::int32_t tile) const {
    return keys_left(queue, tile) < C::kTileK;
  }
  /// Zero-fills V rows past the last key: P is 0 there, but 0 * NaN is NaN. Every warpgroup does it
  /// for itself, because some may skip the tile.
  __device__ __forceinline__ void zero_v_tail(TileQueueState queue, std::int32_t tile,
                                              typename Pipeline::KvState v_state) const {
    constexpr int kVecs = core::kPanelRowBytes / 16;
    const int keys = keys_left(queue, tile);
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < C::kTileK * kVecs; i += 128) {
      if (i / kVecs < keys) continue;
#pragma unroll 1
      for (int panel = 0; panel < C::KeyTile::kPanels; ++panel) {
        unsigned char* s_panel = this->s.v[v_state.stage()] + panel * C::KeyTile::kPanelBytes;
        *reinterpret_cast<uint4*>(s_panel + i * 16) = {};
      }
    }
    fence_async_proxy();
    sync(core::v_tail_barrier(this->t.group), core::kVTailThreads);
  }

  __device__ __forceinline__ void issue_pv(typename Pipeline::KvState v_state, bool accumulates) {
    wgmma_fence();
    sm90::issue_pv<C>(this->acc_o, p_frag, this->s, v_state.stage(), accumulates);
  }
  __device__ __forceinline__ void fence_acc_o() { fence_registers(this->acc_o); }
  __device__ __forceinline__ bool rescales_any() const { return sm90::rescales_any(this->rescale); }
  __device__ __forceinline__ void keep_wait_below() const {
    cuda::keep_wait_below(this->params.order.tiles < 0);
  }
  __device__ __forceinline__ void rescale_o() { sm90::rescale_o<C>(this->acc_o, this->rescale); }

  __device__ __forceinline__ void stash_row_stats(TileQueueState queue) {
    const Params& params = this->params;
    sm90::stash_row_stats<C>(this->s, this->row_stats, this->t, [&](float max) {
      if constexpr (kBiased) return max;
      if constexpr (kFastPath) return max * params.score_scale;
      return max * static_cast<float>(core::kLn2);
    });
  }
  __device__ __forceinline__ void reset_row_stats() { this->row_stats = init_row_stats(); }

  /// Epilogue.
  __device__ __forceinline__ void store_tile(TileQueueState queue) {
    const WorkTile& work = this->work(queue);
    if constexpr (C::kKeyRanges) {
      if (work.ranges > 1 && !fold_ranges<C>(this->acc_o, this->s, this->params, work, this->t)) {
        return;
      }
    } else if constexpr (C::kPackGqa) {
      if (work.tail_split >= 0 &&
          !reduce_tail_splits<C>(this->acc_o, this->s, this->params, work, this->t)) {
        return;
      }
    }
    store_output<C, kPath>(this->acc_o, this->s, this->params.call, work, this->t);
  }

 private:
  static constexpr bool kBitsAhead = kFastPath && C::kConsumers < 3;  // the others would spill

  /// Scale, bias and other modifications.
  __device__ __forceinline__ void add_bias(const Iterator& it) {
    const Params& params = this->params;
    const WorkTile& work = this->work(it.queue);
    if constexpr (kStagesBias) {
      bias.add(this->acc_s, this->t, params.score_scale);
      if (it.remaining > 1) bias.load(params, work, this->t, it.tile + 1);
    } else {
      apply_biased_mods<C>(this->acc_s, this->t, params, work, it.tile);
      if (params.mask.words == nullptr) return;
      load_mask_bits<C>(mask_bits, mask_row<C>(params.mask, work, this->t), params.mask, it.tile);
      hide_masked_keys<C>(this->acc_s, mask_bits);
    }
  }

  /// The softmax of a step whose softcap a polynomial computes; false if none can.
  __device__ __forceinline__ bool caps_exponents(const Iterator& it, bool needs_mask) {
    const Params& params = this->params;
    const bool hides = kMasked || needs_mask;
    float max[2];
    lane_row_max<C, 0, 2>(max, this->acc_s, init_row_stats());
    const CapTier tier = cap_tier<C>(this->acc_s, max, hides, params);
    if (tier == CapTier::formula) return false;
    if (hides) {
      hide_keys(it, needs_mask);
      lane_row_max<C, 0, 2>(max, this->acc_s, init_row_stats());
    }
    const auto with = [&](const auto& polynomial) {
      softcap_softmax<C>(this->acc_s, this->row_stats, this->rescale, max, polynomial,
                         params.call.fault);
    };
    if (!kMasked && tier == CapTier::shortest_polynomial) {
      with(params.shortest_cap_polynomial);
    } else if (tier == CapTier::short_polynomial) {
      with(params.short_cap_polynomial);
    } else {
      with(params.cap_polynomial);
    }
    return true;
  }

  /// The softmax of a step on one side of the diagonal; false if the step is not.
  __device__ __forceinline__ bool adds_alibi(const Iterator& it, bool needs_mask) {
    const Params& params = this->params;
    const AlibiStep step = alibi_step<C>(params, this->work(it.queue), this->t, it.tile);
    if (step.side == AlibiSide::both) return false;
    to_slope_units<C>(this->acc_s, params.score_scale, step);
    hide_keys(it, needs_mask);
    alibi_softmax<C>(this->acc_s, this->row_stats, this->rescale, step.exponent, params.call.fault);
    return true;
  }

  /// Hides keys by position and by the boolean mask.
  __device__ __forceinline__ void hide_keys(const Iterator& it, bool needs_mask) {
    if (needs_mask) apply_mask<C>(this->acc_s, this->t, this->work(it.queue), it.tile);
    if constexpr (kMasked) {
      hide_masked_keys<C>(this->acc_s, mask_bits);
      // The bits of the next step arrive during this one.
      if (kBitsAhead && it.remaining > 1) {
        load_mask_bits<C>(mask_bits, g_mask, this->params.mask, it.tile + 1);
      }
    }
  }
  __device__ __forceinline__ int keys_left(TileQueueState queue, std::int32_t tile) const {
    return this->work(queue).seq.kv_len - tile * C::kTileK;
  }
};

}  // namespace flashcore::cuda::sm90
