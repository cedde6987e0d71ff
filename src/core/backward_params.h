// The launch arguments of the kernels that compute gradients. backend/backward_params.cc fills them
// from a plan and the caller's tensors.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace flashcore::core {

struct BackwardParams {
  /// The forward call. q, k, v, out and lse are inputs. `group` is 1: a work tile has rows of one
  /// query head. `kv_heads` is the number of KV heads.
  AttentionParams fwd;
  std::int32_t group;  // query heads per KV head

  const void* dout;  // [batch, q_heads, q_len, v_dim]
  const void* dlse;  // [batch, q_heads, q_len] or null
  // Null: not wanted.
  void* dq;       // [batch, q_heads, q_len, head_dim]
  void* dk;       // [batch, kv_heads, kv_len, head_dim]
  void* dv;       // [batch, kv_heads, kv_len, v_dim]
  void* dbias;    // [dbias_batch, dbias_heads, dbias_rows, kv_len]
  float* dsinks;  // [q_heads]
  Strides dout_strides, dlse_strides, dq_strides, dk_strides, dv_strides, dbias_strides;
  std::int64_t dsinks_stride;
  Element dout_element, dq_element, dk_element, dv_element, dbias_element;
  std::int32_t dbias_batch, dbias_heads, dbias_rows;
  double scale;    // of Q K^T; fwd.score_scale is that of the softcap's argument
  bool fast_path;  // scores are only scaled and masked by position, and cp.async can fetch dout too
  bool async_dout;

  // One value per row, in the workspace; f64 for f64 problems. P = exp(s - base) * factor. A row
  // without keys has factor 0.
  void* row_base;  // [partial_rows()]
  void* row_factor;
  void* row_delta;          // Σ dout·out - dlse
  std::int32_t stats_rows;  // rows of a CTA that finds them
  // Rows with a larger |lse| find their maximum and sum again: the rounding of lse would show in P.
  // Not if lse covers more keys than the call has.
  bool exact_stats;
  float largest_exact_lse;

  /// [DsNorm, batch, kv_heads]: bits of the largest finite norms of rows of dout and v, and of
  /// |delta| (core/ds_unit.h); null: not wanted.
  std::uint32_t* dout_largest;

  /// [batch, kv_heads]: 1 if an input or a row's statistic of the head is not finite, else 0.
  /// Hopper kernels leave these heads to cuda/simt/repair.cu; null: not wanted.
  std::uint32_t* nonfinite_heads;

  /// dq without scale, before the sum over the chunks: [k_chunks, query tiles, head_dim, tile_q].
  /// Fused kernels: [query tiles, 64 * columns of the kernel] in fragment order.
  void* dq_partials;
  std::int32_t dbias_keys;  // keys of a dbias tile
  std::int32_t k_tiles;     // KV tiles of the longest sequence
  /// Ranges of KV tiles that are computed independently. On GPUs 1 if the kernel is fused, else 0.
  std::int32_t k_chunks;
  std::int32_t chunk_tiles;  // KV tiles of a chunk; the last one may have fewer
};

/// The steps of a call, in order. `pairs` computes dk, dv and dq_partials, `dq` sums the latter.
enum class BackwardStep : std::int32_t { row_stats, pairs, dq, dbias, dsinks };

/// Query tiles of all sequences and heads, for dq_partials. Varlen sequences need one tile more
/// than their rows, each.
FLASHCORE_HD constexpr std::int64_t partial_tiles(std::int64_t batch, std::int64_t q_heads,
                                                  std::int64_t q_tiles, std::int64_t total_q,
                                                  std::int64_t tile_q, bool varlen) {
  return q_heads * (varlen ? total_q / tile_q + batch + 1 : batch * q_tiles);
}

/// The index of query tile `tile` of (b, h) among them. q_row: first row of a varlen sequence.
FLASHCORE_HD std::int64_t partial_tile(const AttentionParams& f, std::int32_t b, std::int32_t h,
                                       std::int32_t q_row, std::int32_t tile) {
  if (f.cu_seqlens_q == nullptr) {
    return (static_cast<std::int64_t>(b) * f.q_heads + h) * f.q_tiles + tile;
  }
  const std::int64_t tiles = static_cast<std::int64_t>(f.total_q) / f.tile_q + f.batch + 1;
  return h * tiles + q_row / f.tile_q + b + tile;
}

/// The number of work tiles of a step.
FLASHCORE_HD std::int64_t backward_tiles(const BackwardParams& p, BackwardStep step) {
  const std::int64_t batch = p.fwd.batch;
  switch (step) {
    case BackwardStep::row_stats: return batch * p.fwd.q_heads * p.fwd.q_tiles;
    case BackwardStep::dq: return p.dq == nullptr ? 0 : batch * p.fwd.q_heads * p.fwd.q_tiles;
    case BackwardStep::pairs:
      return p.dq == nullptr && p.dk == nullptr && p.dv == nullptr
                 ? 0
                 : batch * p.fwd.kv_heads * p.k_chunks;
    case BackwardStep::dbias: {
      const std::int64_t row_tiles = (p.dbias_rows + p.fwd.tile_q - 1) / p.fwd.tile_q;
      return p.dbias == nullptr
                 ? 0
                 : static_cast<std::int64_t>(p.dbias_batch) * p.dbias_heads * row_tiles * p.k_tiles;
    }
    case BackwardStep::dsinks: return p.dsinks == nullptr ? 0 : p.fwd.q_heads;
  }
  return 0;
}

}  // namespace flashcore::core
