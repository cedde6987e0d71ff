// The GEMM policy of AMX: bf16 matrix tiles with f32 accumulators (gemm-inl.h).
//
// TDPBF16PS adds A[16][32] B[32][16] to C[16][16]. Packed operands are such tiles of 1 KiB, 16 rows
// of 64 bytes. Both GEMMs compute transposed results, so query rows stay in the lanes:
//
//   S^T = K Q^T        A = K    [16 keys][32 d]       as in memory
//                      B = Q^T  [16 pairs of d][16 rows][2]
//   O^T = V^T P^T      A = V^T  [16 columns][32 keys]
//                      B = P^T  [16 pairs of keys][16 rows][2]   lane-wise from S^T
//
//   q_tile  [panel][part][head_dim / 32][vector]   k_tile  [keys / 32][part][head_dim / 32][2]
//   p_tile  [part][keys / 32][vector]              v_tile  [v_dim / 32][part][keys / 32][2]
//
// A step multiplies 2 tiles of A by the tiles of a panel's vectors of B. Both are adjacent, and so
// are those of the next step.
//
// bf16 has one part. f16 and f32 are sums of 2 and 3 bf16 parts, and a product is the sum of the
// products of parts; P in f32 has 3 (docs/numerics.md).
//
// Padding is 0 in every operand: P of keys past the end, V of keys that no row sees, dims up to a
// multiple of 32.
#pragma once

#include "cpu/kernels/amx_exact-inl.h"
#include "cpu/kernels/amx_multiply-inl.h"
#include "cpu/kernels/amx_pack-inl.h"
#include "cpu/kernels/amx_parts-inl.h"
#include "cpu/kernels/amx_softmax-inl.h"
#include "cpu/kernels/gemm-inl.h"

namespace flashcore::cpu {
namespace {

/// Operands of a KV tile, shared by its panels.
struct AmxKvTile {
  KeyRange keys;
  core::KvRowMap map;
  AmxKTiles k;
  AmxQScale q_scale;
};

/// A panel of a KV tile, of which it sees the keys up to `end`: S^T, softmax, O^T. O stays in the
/// format of the accumulators.
template <typename Storage, int V>
void process_panel(const WorkTile<float>& work, const AmxKvTile& tile, std::int32_t row,
                   std::int32_t end, KeyRange fully_visible) {
  using Format = AmxFormat<Storage>;
  constexpr std::int64_t kPanelRows = V * kAmxTileRows;
  const AttentionParams& p = work.params;
  const KeyRange seen{tile.keys.begin, end};
  const std::int32_t keys = end - seen.begin;
  const std::int64_t d_tiles = amx_dim_tiles(p.head_dim), v_tiles = amx_dim_tiles(p.v_dim);
  const std::int64_t blocks = amx_key_blocks(keys);
  const char* q =
      static_cast<const char*>(work.q_tile) + row * Format::kParts * d_tiles * kAmxRowBytes;
  char* weights = static_cast<char*>(work.p_tile);
  float* out = work.out_tile + row * v_tiles * 32;
  fence_tile_memory();
  bool has_nan = false;
  for (std::int64_t block = 0; block < blocks; ++block) {
    float* scores = work.scores + block * kAmxKeyStep * kPanelRows;
    multiply_qk<Storage, V>(scores, tile.k.keys(block), q, d_tiles);
    fence_tile_memory();
    // One step behind, so that no load waits for a tile.
    if (Format::kParts > 1 && block > 0) {
      has_nan |= any_nan(scores - kAmxKeyStep * kPanelRows, kAmxKeyStep * V);
    }
  }
  if constexpr (Format::kParts > 1) {
    has_nan |= any_nan(work.scores + (blocks - 1) * kAmxKeyStep * kPanelRows, kAmxKeyStep * V);
    if (has_nan) {
      replace_nan_scores<Storage, V>(work, work.scores, tile.map, row, seen, tile.q_scale.power);
    }
  }
  const float scale = apply_score_scale<V>(work, work.scores, keys, tile.q_scale.rest);
  apply_mods_and_mask<V>(work, work.scores, row, seen, fully_visible);
  AmxRowStats<V> stats(work, row);
  Vec<float> rescale[V];
  for (int v = 0; v < V; ++v) rescale[v] = splat(1.f);
  const bool has_grown = stats.grow(work.scores, keys, scale, p.fault, rescale);
  const AmxPvTiles pv{static_cast<const char*>(work.v_tile), weights,
                      amx_key_blocks(tile.keys.end - tile.keys.begin) * 2 * kAmxTileBytes,
                      blocks * V * kAmxTileBytes, blocks};
  for (std::int32_t block = 0; block < blocks; ++block) {
    const std::int32_t left = keys - block * kAmxKeyStep;
    stats.template exponentiate<Format::kWeightParts>(
        weights + block * V * kAmxTileBytes, pv.p_part,
        work.scores + block * kAmxKeyStep * kPanelRows, left < kAmxKeyStep ? left : kAmxKeyStep,
        scale);
  }
  stats.save(work, row);
  if constexpr (Format::kParts == 1) {
    // O is only passed over if a row's maximum has grown.
    if (has_grown) rescale_output<V>(out, v_tiles * 32, rescale);
    add_pv<V>(out, pv, v_tiles);
  } else {
    add_pv_in_parts<Storage, V>(out, pv, v_tiles, rescale, work.scores);
  }
}

template <typename Storage>
struct AmxGemm {
  using Compute = float;
  static constexpr core::CpuOperands kOperands = AmxFormat<Storage>::kOperands;
  static constexpr int kPanelVecs = 2;
  static constexpr std::int32_t kKeyStep = kAmxKeyStep;

  static void begin() { configure_tiles(); }
  static void end() { _tile_release(); }

  template <int V>
  static void pack_q(const WorkTile<float>& work) {
    pack_amx_q<Storage, V>(work);
  }
  static void pack_k(const WorkTile<float>& work, const KeyTensor& k,
                     const core::KvRowMap& kv_row_map, KeyRange tile, KeyRange visible) {
    pack_amx_k<Storage>(work, k, kv_row_map, tile, visible);
  }
  static void pack_v(const WorkTile<float>& work, const KeyTensor& v,
                     const core::KvRowMap& kv_row_map, KeyRange tile, KeyRange visible) {
    pack_amx_v<Storage>(work, v, kv_row_map, tile, visible);
  }

  template <int V>
  static void process_panels(const WorkTile<float>& work, std::int32_t panels, KeyRange keys) {
    constexpr std::int32_t kRows = V * kAmxTileRows;
    const core::KvRowMap map = core::kv_row_map(work.params, work.sequence, work.b);
    const AmxKvTile tile{
        keys, map, AmxKTiles(work, map, keys, visible_to_tile(work), AmxFormat<Storage>::kParts),
        AmxQScale(core::score_scale<float>(work.params))};
    for (std::int32_t row = 0; row < panels * kRows; row += kRows) {
      const std::int32_t last = (row + kRows < work.rows ? row + kRows : work.rows) - 1;
      const std::int32_t first_query = work.query_of(row), last_query = work.query_of(last);
      const KeyRange visible = core::intersect(
          keys, core::keys_seen_by_any(work.sequence.mask, first_query, last_query));
      if (visible.empty()) continue;
      process_panel<Storage, V>(
          work, tile, row, visible.end,
          core::keys_seen_by_all(work.sequence.mask, first_query, last_query));
    }
  }
};

}  // namespace
}  // namespace flashcore::cpu
