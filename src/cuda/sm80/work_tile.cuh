// What one block works on: rows of one KV head and a range of keys.
#pragma once

#include "core/mask.h"
#include "core/params.h"
#include "core/seq_info.h"
#include "core/sm80_roles.h"

namespace flashcore::cuda::sm80 {

using core::AttentionParams;
using core::KeyRange;
using core::PlantedBug;

struct alignas(16) Item {
  core::Sequence sequence;
  const void* g_k;  // [kv_len, head_dim] of this sequence and KV head; or of the pages' KV head
  const void* g_v;  // [kv_len, v_dim]
  const std::int32_t* g_table;  // this sequence's page ids, or null
  std::int32_t index;           // among the items of a split
  std::int32_t b, kv_head, split;
  std::int32_t splits;           // key ranges that are joined: those of a short sequence are fewer
  std::int32_t first_row, rows;  // of the KV head's q_len * group rows
  KeyRange seen;                 // keys some query of the tile sees, within the split
  KeyRange all;                  // keys all of them see
  float unit;                    // of the scores in the softmax: a plain problem's are not scaled
  float log2_unit;               // unit * log2(e)
};

/// The keys a warp's rows see, within the split: of `all` of them nothing is masked.
struct alignas(16) WarpKeys {
  KeyRange seen;
  KeyRange all;
};

/// A row of the tile: which query of which head it is.
struct Row {
  std::int32_t query;
  std::int32_t head;
};

__device__ __forceinline__ Row row_of(const AttentionParams& p, const Item& item, int r) {
  const core::Division d = core::divide_with_remainder(item.first_row + r, p.by_group);
  return {d.quotient, item.kv_head * p.group + d.remainder};
}

__device__ __forceinline__ float score_factor(const AttentionParams& p) {
  return p.plant.is(PlantedBug::scale_ignored) ? 1.f : static_cast<float>(p.q_factor);
}

__device__ __forceinline__ KeyRange or_nothing(KeyRange range) {
  return range.empty() ? KeyRange{0, 0} : range;
}

/// The keys that rows [first, last] of the tile see.
__device__ __forceinline__ WarpKeys keys_of_rows(const AttentionParams& p, const Item& item,
                                                 int first, int last) {
  const std::int32_t first_query = core::divide(item.first_row + first, p.by_group);
  const std::int32_t last_query = core::divide(item.first_row + last, p.by_group);
  const core::MaskEdges edges = core::mask_edges(item.sequence.mask, first_query);
  const std::int32_t more = last_query - first_query;
  const KeyRange split = core::split_keys(item.split, p.keys_per_split, item.sequence.kv_len);
  return {or_nothing(core::intersect({edges.begin, min(edges.end + more, edges.last)}, split)),
          core::intersect({edges.begin + more, min(edges.end, edges.last)}, split)};
}

/// Items in order: tiles of rows from the last (longest, if causal) to the first, then heads, then
/// batches, then key ranges (where a cluster joins them, these first). rows <= 0: nothing to do.
template <typename C, bool kPlain>
__device__ __forceinline__ Item describe_item(const AttentionParams& p, std::int32_t block) {
  static_assert(C::kTileQ <= core::kEdgeReach);
  Item item;
  const core::Division of_items = core::divide_with_remainder(block, p.by_items);
  item.split = p.joins_in_cluster ? of_items.remainder : of_items.quotient;
  item.index = p.joins_in_cluster ? of_items.quotient : of_items.remainder;
  const core::Division of_tile = core::divide_with_remainder(item.index, p.by_q_tiles);
  const core::Division of_head = core::divide_with_remainder(of_tile.quotient, p.by_kv_heads);
  item.kv_head = of_head.remainder;
  item.b = of_head.quotient;
  item.sequence = p.has_lengths ? core::sequence_of(p, item.b) : core::whole_sequence(p);
  item.splits = p.splits;
  if (p.counters != nullptr && !p.joins_in_cluster && p.has_lengths) {
    item.splits = core::ranges_with_keys(item.sequence.kv_len, p.by_split_keys);
  }
  item.first_row = (p.q_tiles - 1 - of_tile.remainder) * C::kTileQ;
  item.rows = min(C::kTileQ, item.sequence.q_len * p.group - item.first_row);
  const WarpKeys keys = keys_of_rows(p, item, 0, max(item.rows, 1) - 1);
  item.seen = keys.seen;
  item.all = keys.all;
  const std::int64_t kv_head = p.plant.is(PlantedBug::gqa_map_wrong)
                                   ? core::kv_head_of(p, item.kv_head * p.group)
                                   : item.kv_head;
  item.g_table = core::key_rows(p, item.sequence, item.b).table;
  const auto rows_of = [&](const void* g_data, const core::Strides& strides) {
    const auto* g_head = static_cast<const typename C::Stored*>(g_data) + kv_head * strides.head;
    if (item.g_table != nullptr) return g_head;
    return g_head + item.b * strides.batch + item.sequence.k_row * strides.row;
  };
  item.g_k = rows_of(p.k, p.k_strides);
  item.g_v = rows_of(p.v, p.v_strides);
  // Options leave finished scores, and so do scales.
  constexpr bool kScaled = !kPlain || C::kCodes;
  item.unit = kScaled ? 1.f : score_factor(p);
  item.log2_unit = kScaled || p.plant.is(PlantedBug::scale_ignored)
                       ? static_cast<float>(core::kLog2E)
                       : p.log2_scale;
  return item;
}

}  // namespace flashcore::cuda::sm80
