// The work tile of a CTA: rows of one KV head and one split of the keys.
#pragma once

#include "core/mask.h"
#include "core/packed_mask.h"
#include "core/params.h"
#include "core/score.h"
#include "core/seq_info.h"
#include "core/sm80_roles.h"

namespace flashcore::cuda::sm80 {

using core::AttentionParams;
using core::InjectedFault;
using core::KeyRange;

struct alignas(16) WorkTile {
  core::SeqInfo seq;
  const void* g_k;  // [kv_len, head_dim] of the sequence and KV head; paged: of the KV head
  const void* g_v;  // [kv_len, v_dim], likewise
  const std::int32_t* g_table;  // page table of the sequence, or null
  std::int32_t index;           // among the work tiles of a split
  std::int32_t b, kv_head, split;
  std::int32_t splits;           // combined splits; short sequences have fewer than the launch
  std::int32_t first_row, rows;  // of the KV head's q_len * group rows
  KeyRange visible;              // keys of the split that some query of the tile sees
  KeyRange fully_visible;        // keys that all its queries see
  float unit;                    // score per unit of acc_s, which the softmax gets
  float unit_log2;               // unit * log2(e)
  float score_scale, softcap;    // of the call, in f32; softcap < 0: none
};

/// Keys of the split that some row of a warp sees, and keys that need no mask.
struct alignas(16) WarpKeys {
  KeyRange visible;
  KeyRange fully_visible;
};

/// True if modifications need scaled scores. Otherwise the softmax scales.
template <bool kFastPath>
__device__ __forceinline__ bool has_scaled_scores(const AttentionParams& p) {
  return !kFastPath && (p.score_mods & (core::kElementMods | core::kNonPositiveScaleMod)) != 0;
}

/// The query and query head of a row of the tile.
struct Row {
  std::int32_t query;
  std::int32_t head;
};

/// Row r of a KV head is query r / group of the group's head r % group (PackGQA).
__device__ __forceinline__ Row row_of(const AttentionParams& p, const WorkTile& work, int r) {
  const core::DivmodResult d = core::divmod(work.first_row + r, p.group_divmod);
  return {d.quotient, work.kv_head * p.group + d.remainder};
}

__device__ __forceinline__ KeyRange normalize_empty(KeyRange range) {
  return range.empty() ? KeyRange{0, 0} : range;
}

/// The keys that rows [first, last] of the tile see.
__device__ __forceinline__ WarpKeys keys_of_rows(const AttentionParams& p, const WorkTile& work,
                                                 int first, int last) {
  const std::int32_t first_query = core::div(work.first_row + first, p.group_divmod);
  const std::int32_t last_query = core::div(work.first_row + last, p.group_divmod);
  const core::MaskEdges edges = core::mask_edges(work.seq.mask, first_query);
  const std::int32_t more = last_query - first_query;
  const KeyRange split = core::split_keys(work.split, p.keys_per_split, work.seq.kv_len);
  return {normalize_empty(core::intersect({edges.begin, min(edges.end + more, edges.last)}, split)),
          core::intersect({edges.begin + more, min(edges.end, edges.last)}, split)};
}

/// Whole blocks of a packed mask that contain every key visible to the rows of the tile.
__device__ __forceinline__ KeyRange unmasked_keys(const AttentionParams& p, const WorkTile& work) {
  const core::PackedMask mask = core::packed_mask(p);
  const std::int32_t first = core::div(work.first_row, p.group_divmod);
  const std::int32_t last = core::div(work.first_row + work.rows - 1, p.group_divmod);
  const std::int32_t heads = mask.heads > 1 ? p.group : 1;
  KeyRange all{p.kv_len, 0};
#pragma unroll 1
  for (std::int32_t i = 0; i < heads; ++i) {
    const KeyRange keys =
        core::visible_blocks(mask, work.b, work.kv_head * p.group + i, first, last - first + 1);
    all = {min(all.begin, keys.begin), max(all.end, keys.end)};
  }
  return all;
}

/// Order of the CTAs: query tiles from the last (the longest if causal) to the first, then KV
/// heads, then batches, then splits; with a cluster combine, splits first. rows <= 0: no work.
template <typename C, bool kFastPath>
__device__ __forceinline__ WorkTile decode_work_tile(const AttentionParams& p, std::int32_t cta) {
  static_assert(C::kTileQ <= core::kEdgeReach);
  WorkTile work;
  const core::DivmodResult of_tiles = core::divmod(cta, p.cta_divmod);
  work.split = p.cluster_combine ? of_tiles.remainder : of_tiles.quotient;
  work.index = p.cluster_combine ? of_tiles.quotient : of_tiles.remainder;
  const core::DivmodResult of_q_tile = core::divmod(work.index, p.q_tiles_divmod);
  const core::DivmodResult of_head = core::divmod(of_q_tile.quotient, p.kv_heads_divmod);
  work.kv_head = of_head.remainder;
  work.b = of_head.quotient;
  work.seq = p.is_varlen ? core::seq_info_of(p, work.b) : core::dense_seq_info(p);
  work.splits = p.splits;
  if (p.counters != nullptr && !p.cluster_combine && p.is_varlen) {
    work.splits = core::splits_with_keys(work.seq.kv_len, p.split_keys_divmod);
  }
  work.first_row = (p.q_tiles - 1 - of_q_tile.remainder) * C::kTileQ;
  work.rows = min(C::kTileQ, work.seq.q_len * p.group - work.first_row);
  const WarpKeys keys = keys_of_rows(p, work, 0, max(work.rows, 1) - 1);
  work.visible = keys.visible;
  if constexpr (C::kLargeTile) {
    if (p.packed_mask != nullptr && work.rows > 0) {
      work.visible = normalize_empty(core::intersect(keys.visible, unmasked_keys(p, work)));
    }
  }
  work.fully_visible = keys.fully_visible;
  const std::int64_t kv_head = p.fault.is(InjectedFault::gqa_map_wrong)
                                   ? core::kv_head_of(p, work.kv_head * p.group)
                                   : work.kv_head;
  work.g_table = core::kv_row_map(p, work.seq, work.b).table;
  const auto rows_of = [&](const void* g_data, const core::Strides& strides) {
    const auto* g_head = static_cast<const typename C::Stored*>(g_data) + kv_head * strides.head;
    if (work.g_table != nullptr) return g_head;
    return g_head + work.b * strides.batch + work.seq.k_row * strides.row;
  };
  work.g_k = rows_of(p.k, p.k_strides);
  work.g_v = rows_of(p.v, p.v_strides);
  // Score modifications and 8-bit scales leave scaled scores in acc_s.
  const bool scaled = C::kKv8 || has_scaled_scores<kFastPath>(p);
  work.unit = scaled ? 1.f : core::score_scale<float>(p);
  work.unit_log2 = scaled || p.fault.is(InjectedFault::scale_ignored)
                       ? static_cast<float>(core::kLog2E)
                       : p.softmax_scale_log2;
  if constexpr (!kFastPath) {
    work.score_scale = core::score_scale<float>(p);
    work.softcap = p.softcap > 0 ? static_cast<float>(p.softcap) : -1.f;
  }
  return work;
}

}  // namespace flashcore::cuda::sm80
