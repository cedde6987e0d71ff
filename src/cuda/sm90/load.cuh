// The warp that loads: it finds out what there is to do, tells the others, and keeps the rings full.
#pragma once

#include "cuda/primitives/hopper.cuh"
#include "cuda/primitives/report.cuh"
#include "cuda/sm90/config.cuh"

namespace flashcore::cuda::sm90 {

/// rows <= 0: nothing to do.
template <typename C>
__device__ __forceinline__ Item describe_item(const Params& params, std::int32_t index) {
  const AttentionParams& p = params.call;
  const core::WorkItem work = core::work_item(params.order, index);
  Item item;
  item.b = work.batch;
  item.head = work.head;
  item.sequence = p.has_lengths ? core::sequence_of(p, item.b) : core::whole_sequence(p);
  item.first_row = work.q_tile * C::kTileQ;
  item.rows = min(C::kTileQ, item.sequence.q_len - item.first_row);
  const KeyRange seen = core::keys_seen_by_any(item.sequence.mask, item.first_row,
                                               item.first_row + max(item.rows, 1) - 1);
  item.first_tile = seen.begin / C::kTileK;
  item.tiles = seen.empty() ? 0 : (seen.end - 1) / C::kTileK + 1 - item.first_tile;
  return item;
}

template <typename Tile>
__device__ __forceinline__ void copy_tile(unsigned char* s_tile, const CUtensorMap& map, int row,
                                          int head, int batch, std::uint64_t& s_full) {
  arrive_expecting(s_full, Tile::kBytes);
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    copy_box(shared_address(s_tile) + panel * Tile::kPanelBytes, map, panel * core::kPanelColumns,
             row, head, batch, s_full);
  }
}

/// One thread of the block.
template <typename C>
__device__ __forceinline__ void load(SharedStorage<C>& s, const Params& params) {
  const AttentionParams& p = params.call;
  prefetch_map(params.q);
  prefetch_map(params.k);
  prefetch_map(params.v);
  wait_for_previous_kernel();
  RingPlace<C::kStages> k_place, v_place;
  RingPlace<2> item_place;
  RingPlace<1> q_place;
  for (std::int32_t index = blockIdx.x; index < params.order.items; index += gridDim.x) {
    const Item item = describe_item<C>(params, index);
    if (p.has_lengths) report(p, item.sequence.error);
    if (item.rows <= 0) continue;
    wait(s.item_empty[item_place.stage], item_place.parity ^ 1);
    s.items[item_place.stage] = item;
    arrive(s.item_full[item_place.stage]);
    item_place.next();
    if (item.tiles == 0) continue;
    const int q_batch = p.cu_seqlens_q != nullptr ? 0 : item.b;
    const int k_batch = p.cu_seqlens_k != nullptr ? 0 : item.b;
    const int kv_head = core::kv_head_of(p, item.head);
    const auto load_keys = [&](int tile) {
      wait(s.k_empty[k_place.stage], k_place.parity ^ 1);
      copy_tile<typename C::KeyTile>(s.k[k_place.stage], params.k,
                                     item.sequence.k_row + tile * C::kTileK, kv_head, k_batch,
                                     s.k_full[k_place.stage]);
      k_place.next();
    };
    wait(s.q_empty, q_place.parity ^ 1);
    copy_tile<typename C::QueryTile>(s.q, params.q, item.sequence.q_row + item.first_row, item.head,
                                     q_batch, s.q_full);
    q_place.next();
    // In the order in which they are needed: the scores of a step are begun before the step before
    // it meets its values.
    const int last = item.first_tile + item.tiles - 1;
    load_keys(last);
    for (int tile = last; tile >= item.first_tile; --tile) {
      if (tile > item.first_tile) load_keys(tile - 1);
      wait(s.v_empty[v_place.stage], v_place.parity ^ 1);
      copy_tile<typename C::KeyTile>(s.v[v_place.stage], params.v,
                                     item.sequence.k_row + tile * C::kTileK, kv_head, k_batch,
                                     s.v_full[v_place.stage]);
      v_place.next();
    }
  }
  wait(s.item_empty[item_place.stage], item_place.parity ^ 1);
  s.items[item_place.stage].rows = -1;
  arrive(s.item_full[item_place.stage]);
}

}  // namespace flashcore::cuda::sm90
