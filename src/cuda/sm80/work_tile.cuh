// What one block works on: rows of one KV head and a range of keys.
#pragma once

#include "core/mask.h"
#include "core/params.h"
#include "core/seq_info.h"
#include "core/sm80_roles.h"

namespace flashcore::cuda::sm80 {

using core::AttentionParams;
using core::InjectedFault;
using core::KeyRange;

struct alignas(16) WorkTile {
  core::SeqInfo seq;
  const void* g_k;  // [kv_len, head_dim] of this sequence and KV head; or of the pages' KV head
  const void* g_v;  // [kv_len, v_dim]
  const std::int32_t* g_table;  // this sequence's page ids, or null
  std::int32_t index;           // among the items of a split
  std::int32_t b, kv_head, split;
  std::int32_t splits;           // key ranges that are joined: those of a short sequence are fewer
  std::int32_t first_row, rows;  // of the KV head's q_len * group rows
  KeyRange visible;              // keys some query of the tile sees, within the split
  KeyRange fully_visible;        // keys all of them see
  float unit;                    // of the scores in the softmax: a plain problem's are not scaled
  float unit_log2;               // unit * log2(e)
};

/// The keys a warp's rows see, within the split: of `all` of them nothing is masked.
struct alignas(16) WarpKeys {
  KeyRange visible;
  KeyRange fully_visible;
};

/// A row of the tile: which query of which head it is.
struct Row {
  std::int32_t query;
  std::int32_t head;
};

__device__ __forceinline__ Row row_of(const AttentionParams& p, const WorkTile& item, int r) {
  const core::DivmodResult d = core::divmod(item.first_row + r, p.group_divmod);
  return {d.quotient, item.kv_head * p.group + d.remainder};
}

__device__ __forceinline__ float score_scale(const AttentionParams& p) {
  return p.fault.is(InjectedFault::scale_ignored) ? 1.f : static_cast<float>(p.score_scale);
}

__device__ __forceinline__ KeyRange or_nothing(KeyRange range) {
  return range.empty() ? KeyRange{0, 0} : range;
}

/// The keys that rows [first, last] of the tile see.
__device__ __forceinline__ WarpKeys keys_of_rows(const AttentionParams& p, const WorkTile& item,
                                                 int first, int last) {
  const std::int32_t first_query = core::div(item.first_row + first, p.group_divmod);
  const std::int32_t last_query = core::div(item.first_row + last, p.group_divmod);
  const core::MaskEdges edges = core::mask_edges(item.seq.mask, first_query);
  const std::int32_t more = last_query - first_query;
  const KeyRange split = core::split_keys(item.split, p.keys_per_split, item.seq.kv_len);
  return {or_nothing(core::intersect({edges.begin, min(edges.end + more, edges.last)}, split)),
          core::intersect({edges.begin + more, min(edges.end, edges.last)}, split)};
}

/// Items in order: tiles of rows from the last (longest, if causal) to the first, then heads, then
/// batches, then key ranges (where a cluster joins them, these first). rows <= 0: nothing to do.
template <typename C, bool kFastPath>
__device__ __forceinline__ WorkTile decode_work_tile(const AttentionParams& p, std::int32_t block) {
  static_assert(C::kTileQ <= core::kEdgeReach);
  WorkTile item;
  const core::DivmodResult of_items = core::divmod(block, p.by_items);
  item.split = p.cluster_combine ? of_items.remainder : of_items.quotient;
  item.index = p.cluster_combine ? of_items.quotient : of_items.remainder;
  const core::DivmodResult of_tile = core::divmod(item.index, p.by_q_tiles);
  const core::DivmodResult of_head = core::divmod(of_tile.quotient, p.by_kv_heads);
  item.kv_head = of_head.remainder;
  item.b = of_head.quotient;
  item.seq = p.is_varlen ? core::seq_info_of(p, item.b) : core::dense_seq_info(p);
  item.splits = p.splits;
  if (p.counters != nullptr && !p.cluster_combine && p.is_varlen) {
    item.splits = core::splits_with_keys(item.seq.kv_len, p.split_keys_divmod);
  }
  item.first_row = (p.q_tiles - 1 - of_tile.remainder) * C::kTileQ;
  item.rows = min(C::kTileQ, item.seq.q_len * p.group - item.first_row);
  const WarpKeys keys = keys_of_rows(p, item, 0, max(item.rows, 1) - 1);
  item.visible = keys.visible;
  item.fully_visible = keys.fully_visible;
  const std::int64_t kv_head = p.fault.is(InjectedFault::gqa_map_wrong)
                                   ? core::kv_head_of(p, item.kv_head * p.group)
                                   : item.kv_head;
  item.g_table = core::kv_row_map(p, item.seq, item.b).table;
  const auto rows_of = [&](const void* g_data, const core::Strides& strides) {
    const auto* g_head = static_cast<const typename C::Stored*>(g_data) + kv_head * strides.head;
    if (item.g_table != nullptr) return g_head;
    return g_head + item.b * strides.batch + item.seq.k_row * strides.row;
  };
  item.g_k = rows_of(p.k, p.k_strides);
  item.g_v = rows_of(p.v, p.v_strides);
  // Options leave finished scores, and so do scales.
  constexpr bool kScaled = !kFastPath || C::kKv8;
  item.unit = kScaled ? 1.f : score_scale(p);
  item.unit_log2 = kScaled || p.fault.is(InjectedFault::scale_ignored)
                       ? static_cast<float>(core::kLog2E)
                       : p.softmax_scale_log2;
  return item;
}

}  // namespace flashcore::cuda::sm80
