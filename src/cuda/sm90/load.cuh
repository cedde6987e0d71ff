// The warps that do not compute: one deals out the work, one loads.
#pragma once

#include "cuda/primitives/hopper.cuh"
#include "cuda/primitives/report.cuh"
#include "cuda/sm90/config.cuh"
#include "cuda/sm90/scores.cuh"

namespace flashcore::cuda::sm90 {

/// Written where it is needed, piece by piece: the thread that does it has few registers. Returns
/// whether there is something to do.
template <typename C>
__device__ __forceinline__ bool describe_item(Item& s_item, const Params& params,
                                              std::int32_t index) {
  const AttentionParams& p = params.call;
  const core::WorkPiece piece =
      C::kSpread ? core::work_piece(params.tail, index) : core::WorkPiece{index, -1};
  const core::WorkItem work = core::work_item(params.order, piece.item);
  if constexpr (C::kSpread) {
    s_item.part = piece.part;
    s_item.cut_item = piece.item - params.tail.first;
  }
  const core::HeadsInTile heads = C::kSpread ? params.heads : core::HeadsInTile{};
  s_item.b = work.batch;
  s_item.head = work.head << heads.log2;
  s_item.first_query = work.q_tile * (C::kTileQ >> heads.log2);
  s_item.sequence = p.has_lengths ? core::sequence_of(p, work.batch) : core::whole_sequence(p);
  if (p.has_lengths) report(p, s_item.sequence.error);
  asm volatile("" ::: "memory");
  const std::int32_t first = s_item.first_query;
  const std::int32_t queries = min(C::kTileQ >> heads.log2, s_item.sequence.q_len - first);
  s_item.queries = queries;
  s_item.edges = core::mask_edges(s_item.sequence.mask, first);
  asm volatile("" ::: "memory");
  const std::int32_t begin = core::visible_keys(s_item.sequence.mask, first).begin;
  const std::int32_t end =
      core::visible_keys(s_item.sequence.mask, first + max(queries, 1) - 1).end;
  // An item without keys has one step all the same, whose scores are all hidden: see kItems.
  const bool empty = end <= begin;
  s_item.first_tile = empty ? 0 : begin / C::kTileK;
  s_item.tiles = empty ? 1 : (end - 1) / C::kTileK + 1 - s_item.first_tile;
  if (C::kSpread && s_item.part >= 0) {
    const std::int32_t before = s_item.part * params.tail.part_tiles;
    s_item.first_tile += before;
    s_item.tiles = min(s_item.tiles - before, params.tail.part_tiles);
  }
#pragma unroll 1
  for (int group = 0; group < C::kConsumers; ++group) {
    const std::int32_t own_first = first + heads.queries() * group;
    const std::int32_t own_end = min(own_first + heads.queries(), first + queries);
    const KeyRange of_first = core::visible_keys(s_item.sequence.mask, own_first);
    const KeyRange of_last =
        core::visible_keys(s_item.sequence.mask, max(own_end, own_first + 1) - 1);
    s_item.uncut[group] = {(of_last.begin + C::kTileK - 1) / C::kTileK, of_first.end / C::kTileK};
    // At least one, so that it goes the way of the others; and it passes over one at most.
    const std::int32_t own = (of_last.end + C::kTileK - 1) / C::kTileK - s_item.first_tile;
    s_item.own_tiles[group] = max(min(own, s_item.tiles), max(s_item.tiles - 1, 1));
    s_item.passes[group] = s_item.own_tiles[group] < s_item.tiles;
  }
  return queries > 0;
}

/// The factors that all rows and keys of an item have in common.
template <typename C>
__device__ __forceinline__ void describe_scales(SharedStorage<C>& s, const AttentionParams& p,
                                                int stage) {
  const Item& item = s.items[stage];
  const int kv_head = core::kv_head_of(p, item.head);
  const auto of_head = [&](const core::Scales& scales, int head) {
    return scales.by_rows() ? 1.f : scales.at(item.b, head, 0);
  };
  s.score_factor[stage] =
      score_factor(p) * of_head(p.q_scale, item.head) * of_head(p.k_scale, kv_head);
  s.output_factor[stage] = of_head(p.v_scale, kv_head);
}

inline constexpr int kTilesAhead = 2;  // of an item's end, the next one is asked for

/// Of a tile whose bytes s_full expects.
template <typename Tile>
__device__ __forceinline__ void copy_panels(unsigned char* s_tile, const CUtensorMap& map, int row,
                                            int head, int batch, std::uint64_t& s_full) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    copy_box(shared_address(s_tile) + panel * Tile::kPanelBytes, map, panel * Tile::kPanelColumns,
             row, head, batch, s_full);
  }
}

template <typename Tile>
__device__ __forceinline__ void copy_tile(unsigned char* s_tile, const CUtensorMap& map, int row,
                                          int head, int batch, std::uint64_t& s_full) {
  arrive_expecting(s_full, Tile::kBytes);
  copy_panels<Tile>(s_tile, map, row, head, batch, s_full);
}

/// Where an item's tiles are in the tensor maps.
struct Source {
  int q_batch, k_batch, kv_head;
};

__device__ __forceinline__ Source source_of(const AttentionParams& p, const Item& item) {
  return {p.cu_seqlens_q != nullptr ? 0 : item.b, p.cu_seqlens_k != nullptr ? 0 : item.b,
          core::kv_head_of(p, item.head)};
}

/// The piece of work after this one. They are dealt out as blocks ask for them; the last to ask
/// leaves the ticket at 0.
__device__ __forceinline__ std::int32_t next_item(const Params& params) {
  const auto blocks = static_cast<std::int32_t>(gridDim.x);
  if (params.pieces <= blocks) return params.pieces;
  return blocks + static_cast<std::int32_t>(atomicInc(params.ticket, params.pieces - 1));
}

/// The thread that deals out the block's work. It asks for an item when the one before is nearly
/// loaded: early enough to hide the answer's way, late enough that a block with long items does not
/// sit on others.
template <typename C>
__device__ __forceinline__ void deal(SharedStorage<C>& s, const Params& params) {
  wait_for_previous_kernel();
  RingPlace<kItems> place;
  std::int32_t index = blockIdx.x;
  while (index < params.pieces) {
    wait(s.item_empty[place.stage()], place.parity() ^ 1);
    if (describe_item<C>(s.items[place.stage()], params, index)) {
      if constexpr (C::kCodes) describe_scales<C>(s, params.call, place.stage());
      arrive(s.item_full[place.stage()]);
      wait(s.item_wanted, place.steps % 2);
      place.next();
    }
    index = next_item(params);
  }
  wait(s.item_empty[place.stage()], place.parity() ^ 1);
  s.items[place.stage()].queries = -1;
  arrive(s.item_full[place.stage()]);
}

/// Where values come to: 8-bit ones on their way to the warps that transpose them.
template <typename C>
inline constexpr int kValueStages = C::kCodes ? C::kRawStages : C::kStages;

template <typename C>
__device__ __forceinline__ void load_values(SharedStorage<C>& s, const Params& params,
                                            RingPlace<kValueStages<C>> place, int row,
                                            const Source& from) {
  const auto load = [&](auto& tiles, std::uint64_t* s_full, std::uint64_t* s_empty) {
    wait(s_empty[place.stage()], place.parity() ^ 1);
    copy_tile<typename C::KeyTile>(tiles[place.stage()], params.v, row, from.kv_head, from.k_batch,
                                   s_full[place.stage()]);
  };
  if constexpr (C::kCodes) {
    load(s.raw_v, s.raw_full, s.raw_empty);
  } else {
    load(s.v, s.v_full, s.v_empty);
  }
}

/// The thread that keeps the rings full.
template <typename C>
__device__ __forceinline__ void load(SharedStorage<C>& s, const Params& params) {
  prefetch_map(params.q);
  prefetch_map(params.k);
  prefetch_map(params.v);
  wait_for_previous_kernel();
  RingPlace<C::kStages> k_place;
  RingPlace<kValueStages<C>> v_place;
  RingPlace<kItems> place;
  for (;; place.next()) {
    wait(s.item_full[place.stage()], place.parity());
    const Item& item = s.items[place.stage()];
    if (item.queries < 0) return;
    const Source from = source_of(params.call, item);
    const auto load_keys = [&](int tile) {
      wait(s.k_empty[k_place.stage()], k_place.parity() ^ 1);
      copy_tile<typename C::KeyTile>(s.k[k_place.stage()], params.k,
                                     item.sequence.k_row + tile * C::kTileK, from.kv_head,
                                     from.k_batch, s.k_full[k_place.stage()]);
      k_place.next();
    };
    const auto load_queries = [&](int group, int end_group) {
      using Piece = typename C::QueryTile;
      const int queries_each = C::kSpread ? params.heads.queries() : core::kQueryPieceRows;
#pragma unroll 1
      while (group < end_group) {
        const QueryPlace<C> queries{place.steps, group};
        wait(s.q_empty[queries.barrier()], queries.parity() ^ 1);
        arrive_expecting(s.q_full[queries.barrier()], C::kQueriesTogether * Piece::kBytes);
#pragma unroll
        for (int i = 0; i < C::kQueriesTogether; ++i, ++group) {
          copy_panels<Piece>(s.q[queries.place() + i], params.q,
                             item.sequence.q_row + item.first_query + group * queries_each,
                             item.head, from.q_batch, s.q_full[queries.barrier()]);
        }
      }
    };
    const int end_tile = item.first_tile + item.tiles;
    // First what finds its room free first: queries that need not wait for those of the item before
    // this one, then the first keys.
    constexpr int kFree = C::kQueryPlaces - C::kConsumers;
    load_queries(0, kFree);
    load_keys(item.first_tile);
    load_queries(kFree, C::kConsumers);
    // In the order in which they are needed: the scores of a step are begun before the step before
    // it meets its values.
    if (item.tiles <= kTilesAhead) arrive(s.item_wanted);
    for (int tile = item.first_tile; tile < end_tile; ++tile) {
      if (tile + 1 + kTilesAhead == end_tile) arrive(s.item_wanted);
      if (tile + 1 < end_tile) load_keys(tile + 1);
      load_values<C>(s, params, v_place, item.sequence.k_row + tile * C::kTileK, from);
      v_place.next();
    }
    arrive(s.item_empty[place.stage()]);
  }
}

}  // namespace flashcore::cuda::sm90
