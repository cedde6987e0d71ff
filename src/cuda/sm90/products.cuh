// What both kinds of computing warpgroups share: Q K^T, and where they are in the stream of steps.
#pragma once

#include "cuda/primitives/hopper.cuh"
#include "cuda/primitives/wgmma.cuh"
#include "cuda/sm90/config.cuh"

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

/// A tile that only later rows see is given back unused, and so is the turn at the tensor cores.
template <typename C>
__device__ __forceinline__ void pass_keys(SharedStorage<C>& s, RingPlace<C::kStages> place,
                                          const Thread<C>& t) {
  wait(s.k_full[place.stage()], place.parity());
  arrive_once_per_warp(s.k_empty[place.stage()], t.lane);
  if (C::kForm.turns) {
    sync_named(kTurnBarrier + t.group, 256);
    arrive_named(kTurnBarrier + (t.group + 1) % C::kConsumers, 256);
  }
}

template <typename C>
__device__ __forceinline__ void pass_values(SharedStorage<C>& s, RingPlace<C::kStages> place,
                                            const Thread<C>& t) {
  wait(s.v_full[place.stage()], place.parity());
  arrive_once_per_warp(s.v_empty[place.stage()], t.lane);
}

/// Where a warpgroup is in the stream of steps: items follow each other without a pause.
template <typename C>
struct Step {
  RingPlace<C::kStages> place;  // of its K and V
  RingPlace<kItems> item;
  std::int32_t tile;
  std::int32_t left;  // steps of the warpgroup in the item, with this one

  /// Whether some rows do not see all of its keys.
  __device__ __forceinline__ bool cut(const SharedStorage<C>& s, const Thread<C>& t) const {
    return !s.items[item.stage()].uncut[t.group].contains(tile);
  }

  __device__ __forceinline__ QueryPlace<C> queries(const Thread<C>& t) const {
    return {item.steps, t.group};
  }
};

/// Waits for item `at.item`; false: there is none.
template <typename C>
__device__ __forceinline__ bool enter_item(Step<C>& at, SharedStorage<C>& s, const Thread<C>& t) {
  wait(s.item_full[at.item.stage()], at.item.parity());
  const Item& item = s.items[at.item.stage()];
  if (item.queries < 0) return false;
  const QueryPlace<C> queries = at.queries(t);
  wait(s.q_full[queries.barrier()], queries.parity());
  at.left = item.own_tiles[t.group];
  at.tile = item.first_tile;
  return true;
}

}  // namespace flashcore::cuda::sm90
