// What both kinds of consumer warpgroups share: Q K^T, and how they wait for others.
#pragma once

#include "cuda/primitives/hopper.cuh"
#include "cuda/primitives/wgmma.cuh"
#include "cuda/sm90/config.cuh"
#include "cuda/sm90/softmax.cuh"

namespace flashcore::cuda::sm90 {

/// score = Q K^T, begun.
template <typename C>
__device__ __forceinline__ void begin_scores(Scores<C>& score, SharedStorage<C>& s, int q_place,
                                             int stage) {
  using Q = typename C::QueryTile;
  using K = typename C::KeyTile;
  const std::uint64_t q = core::matrix_descriptor(shared_address(s.q[q_place]), 0);
  const std::uint64_t k = core::matrix_descriptor(shared_address(s.k[stage]), 0);
  using Product = Wgmma<C::kTileK>;
  Product::template along_rows<typename C::Operand, false>(score, q, k);
#pragma unroll
  for (int step = 1; step < C::kProductSteps; ++step) {
    Product::template along_rows<typename C::Operand, true>(
        score, core::advance(q, Q::along_rows(step)), core::advance(k, K::along_rows(step)));
  }
  commit_products();
}

/// What the consumer warps of 16-bit and of e4m3 tensors share (core/sm90_roles.h).
template <typename C>
struct ConsumerWarp : RoleWarp<C> {
  using Pipeline = typename C::Pipeline;
  using Position = core::KvPosition<Pipeline>;
  static constexpr bool kPingPong = C::kForm.turns;
  const Thread<C> t;
  Scores<C> score;
  Outputs<C> o;
  RowStates states;
  float rescale[2];

  __device__ __forceinline__ ConsumerWarp(SharedStorage<C>& s, const Params& params,
                                          const Thread<C>& thread)
      : RoleWarp<C>{s, params}, t(thread) {}

  __device__ __forceinline__ int group() const { return t.group; }

  template <Sm90Barrier kBarrier, typename Place>
  __device__ __forceinline__ void arrive(const Place& place) const {
    arrive_once_per_warp(this->s.template barrier<kBarrier>(place.stage()), t.lane);
  }

  __device__ __forceinline__ void take_turn() const {
    sync_named(core::turn_barrier(t.group), core::kTurnThreads);
  }
  __device__ __forceinline__ void give_turn() const {
    arrive_named(core::turn_barrier((t.group + 1) % C::kConsumers), core::kTurnThreads);
  }

  /// Whether some rows do not see all keys of the tile.
  __device__ __forceinline__ bool needs_mask(const Position& at) const {
    return !this->item(at.item).uncut[t.group].contains(at.tile);
  }

  __device__ __forceinline__ void issue_qk(typename Pipeline::QueryPlace queries,
                                           typename Pipeline::KvPlace keys, const Position&) {
    fence_products();
    begin_scores<C>(score, this->s, queries.place(), keys.stage());
  }
  template <int kPending>
  __device__ __forceinline__ void wait_products() const {
    cuda::wait_products<kPending>();
  }
  __device__ __forceinline__ void scores_are_there() { pin(score); }
};

}  // namespace flashcore::cuda::sm90
