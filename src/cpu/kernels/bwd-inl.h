// Gradients of attention on the CPU, in steps that each write their own results:
//
//   row_stats  base, factor and delta of every row (core/backward_params.h)
//   pairs      dK = scale · Σ_i dZ_i Q_i,     tile: (batch, KV head, chunk of KV tiles); sums over
//              dV = Σ_i P_i dO_i,             the heads of the group and their rows, in this order
//              partial dQ = Σ_j dZ_j K_j      of the chunk's keys, tile by tile
//   dq         dQ = scale · Σ partial dQ      tile: (batch, query head, 64 rows)
//   dbias      Σ dS over the repeated axes    tile: 64 rows × tile_k keys of dbias
//   dsinks     -Σ exp(sink - lse) · delta     tile: a query head
//
// Every sum has a fixed order, and the plan fixes the chunks, so the bits do not depend on the
// number of threads. S and dP are computed once, for all three gradients.
//
// target_<isa>_bwd.cc includes this file. As in fwd-inl.h, nothing here may have external linkage
// or come from the standard library.
#pragma once

#include "core/cancel.h"
#include "core/element.h"
#include "cpu/backward_kernel.h"
#include "cpu/kernels/bwd_tile-inl.h"

namespace flashcore::cpu {
namespace {

/// base, factor and delta of a row from lse, out, dout and dlse. `work` holds two rows of v_dim.
template <typename T, typename Storage>
void row_stats_from_forward(BackwardTile<T>& t, std::int32_t r, T* work) {
  const AttentionParams& f = t.p.fwd;
  const std::int64_t q_row = static_cast<std::int64_t>(t.sequence.q_row) + t.first_row + r;
  const T lse = static_cast<const T*>(f.lse)[core::row_offset(f.lse_strides, t.b, t.h, q_row)];
  const bool guards = !f.fault.is(InjectedFault::empty_row_unguarded);
  t.base[r] = t.factor[r] = t.delta[r] = T(0);
  if (lse == core::negative_infinity<T>() && guards) return;
  T* out = work;
  T* dout = work + t.v_row;
  load_any_row<T, Storage>(out, f.out, f.out_element,
                           core::row_offset(f.out_strides, t.b, t.h, q_row), f.out_strides.column,
                           f.v_dim);
  load_any_row<T, Storage>(dout, t.p.dout, t.p.dout_element,
                           core::row_offset(t.p.dout_strides, t.b, t.h, q_row),
                           t.p.dout_strides.column, f.v_dim);
  T delta = T(0);
  for (std::int32_t c = 0; c < f.v_dim; ++c) delta = delta + dout[c] * out[c];
  if (t.p.dlse != nullptr && !f.fault.is(InjectedFault::dlse_ignored)) {
    delta = delta -
            static_cast<const T*>(t.p.dlse)[core::row_offset(t.p.dlse_strides, t.b, t.h, q_row)];
  }
  t.base[r] = lse;
  t.factor[r] = T(1);
  t.delta[r] = delta;
}

template <typename T>
bool needs_exact_stats(const BackwardTile<T>& t, std::int32_t r) {
  const T lse = t.base[r];
  return t.p.exact_stats && t.factor[r] != T(0) && lse != core::negative_infinity<T>() &&
         (lse > T(t.p.largest_exact_lse) || lse < -T(t.p.largest_exact_lse));
}

/// The maximum and sum of the rows whose LSE is too large, by the forward's online softmax.
template <typename T, typename Storage>
void find_exact_stats(BackwardTile<T>& t) {
  const AttentionParams& f = t.p.fwd;
  load_queries<T, Storage>(t);
  core::SoftmaxState<T> state[kTileRows];
  for (auto& one : state) one = {core::negative_infinity<T>(), T(0)};
  const KeyRange visible =
      core::keys_seen_by_any(t.sequence.mask, t.first_row, t.first_row + t.rows - 1);
  for (std::int32_t first = visible.empty() ? visible.end
                                            : core::tile_begin(visible.begin, f.tile_k);
       first < visible.end && !core::is_set(t.cancel); first += f.tile_k) {
    const KeyRange keys = core::intersect(visible, {first, first + f.tile_k});
    load_keys<T, Storage>(t.k_tile, f.k, f.k_strides, t, t.h / t.p.group, keys, f.head_dim);
    compute_scores(t, t.k_tile, keys);
    for (std::int32_t r = 0; r < t.rows; ++r) {
      if (!needs_exact_stats(t, r)) continue;
      T max = state[r].max, sum = T(0);
      for (std::int32_t key = 0; key < keys.end - keys.begin; ++key) {
        const T s = t.prob[key * kTileRows + r];
        max = s > max ? s : max;
      }
      const T base = core::softmax_base(max);
      for (std::int32_t key = 0; key < keys.end - keys.begin; ++key) {
        sum += core::exp_scalar(t.prob[key * kTileRows + r] - base);
      }
      state[r] = {max,
                  core::add_tile_sum(state[r].sum, core::exp_scalar(state[r].max - base), sum)};
    }
  }
  for (std::int32_t r = 0; r < t.rows; ++r) {
    if (!needs_exact_stats(t, r)) continue;
    if (f.sinks != nullptr) {
      core::add_sink(state[r], static_cast<T>(f.sinks[t.h * f.sinks_stride]));
    }
    t.base[r] = core::softmax_base(state[r].max);
    t.factor[r] = core::output_factor(state[r].sum);
  }
}

template <typename T, typename Storage>
void row_stats_step(BackwardTile<T>& t, std::int64_t index) {
  const AttentionParams& f = t.p.fwd;
  const auto tile = static_cast<std::int32_t>(index % f.q_tiles);
  index /= f.q_tiles;
  t.b = static_cast<std::int32_t>(index / f.q_heads);
  t.sequence = core::seq_info_of(f, t.b);
  if (!select_rows(t, static_cast<std::int32_t>(index % f.q_heads), tile)) return;
  bool exact = false;
  for (std::int32_t r = 0; r < t.rows; ++r) {
    row_stats_from_forward<T, Storage>(t, r, t.do_rows);
    exact = exact || needs_exact_stats(t, r);
  }
  if (exact) find_exact_stats<T, Storage>(t);
  for (std::int32_t r = 0; r < t.rows; ++r) {
    const std::int64_t at = t.stats_index(r);
    static_cast<T*>(t.p.row_base)[at] = t.base[r];
    static_cast<T*>(t.p.row_factor)[at] = t.factor[r];
    static_cast<T*>(t.p.row_delta)[at] = t.delta[r];
  }
}

/// The keys of a chunk. The last one may be longer than the sequence.
FLASHCORE_HD KeyRange chunk_keys(const BackwardParams& p, std::int32_t chunk) {
  const std::int32_t keys = p.chunk_tiles * p.fwd.tile_k;
  return {chunk * keys, (chunk + 1) * keys};
}

template <typename T>
KeyRange keys_of_rows(const BackwardTile<T>& t) {
  return core::keys_seen_by_any(t.sequence.mask, t.first_row, t.first_row + t.rows - 1);
}

template <typename T>
T* partial_of(const BackwardTile<T>& t, std::int32_t chunk) {
  const AttentionParams& f = t.p.fwd;
  const std::int64_t tiles = core::partial_tiles(f.batch, f.q_heads, f.q_tiles, f.total_q, f.tile_q,
                                                 f.cu_seqlens_q != nullptr);
  const std::int64_t tile =
      chunk * tiles + core::partial_tile(f, t.b, t.h, t.sequence.q_row, t.first_row / kTileRows);
  return static_cast<T*>(t.p.dq_partials) + tile * f.head_dim * kTileRows;
}

/// partial[d][row] (+)= Σ_key K[key][d] dZ[key][row]. The chunk's first KV tile that the rows see
/// overwrites the partial result.
template <typename T>
void add_to_dq(const BackwardTile<T>& t, std::int32_t chunk, const T* k, KeyRange keys) {
  const BackwardParams& p = t.p;
  const AttentionParams& f = p.fwd;
  const std::int32_t count = keys.end - keys.begin;
  const KeyRange seen = core::intersect(keys_of_rows(t), chunk_keys(p, chunk));
  const bool first = keys.begin == seen.begin;
  const Rows<T> to{partial_of(t, chunk), kTileRows};
  const Scalars<T> a{k, 1, f.head_dim};
  const Rows<T> dz{t.ds, kTileRows};
  if (first) {
    gemm<false>(to, a, dz, f.head_dim, t.row_vecs(), count);
  } else {
    gemm<true>(to, a, dz, f.head_dim, t.row_vecs(), count);
  }
  if (keys.begin == 0 && f.fault.is(InjectedFault::dq_tile_twice)) {
    gemm<true>(to, a, dz, f.head_dim, t.row_vecs(), count);
  }
}

/// Adds the rows of the tile to the gradients of the keys of one KV tile. `offset` is the first of
/// `keys` in the block, whose K and V are loaded.
template <typename T>
void add_pairs(BackwardTile<T>& t, std::int32_t chunk, KeyRange keys, std::int64_t offset,
               const T* k_clean) {
  const AttentionParams& f = t.p.fwd;
  const std::int32_t count = keys.end - keys.begin;
  compute_scores(t, t.k_tile + offset * f.head_dim, keys);
  compute_probabilities(t, count);
  if (t.p.dq != nullptr || t.p.dk != nullptr) {
    compute_ds(t, t.v_tile + offset * f.v_dim, count, true);
  }
  if (t.p.dq != nullptr) add_to_dq(t, chunk, k_clean + offset * f.head_dim, keys);
  if (t.p.dk != nullptr) {
    gemm<true>(Rows<T>{t.dk + offset * t.q_row, t.q_row}, Scalars<T>{t.ds, kTileRows, 1},
               Rows<T>{t.q_rows, t.q_row}, count, (f.head_dim + kLanes<T> - 1) / kLanes<T>, t.rows);
  }
  if (t.p.dv != nullptr) {
    poison_probabilities(t, count);
    gemm<true>(Rows<T>{t.dv + offset * t.v_row, t.v_row}, Scalars<T>{t.prob, kTileRows, 1},
               Rows<T>{t.do_rows, t.v_row}, count, (f.v_dim + kLanes<T> - 1) / kLanes<T>, t.rows);
  }
}

/// Adds the rows of the tile to the gradients of all KV tiles of a block.
template <typename T, typename Storage>
void add_rows(BackwardTile<T>& t, std::int32_t chunk, KeyRange block, const T* k_clean) {
  const std::int32_t tile_k = t.p.fwd.tile_k;
  const KeyRange visible = core::intersect(block, keys_of_rows(t));
  if (visible.empty()) return;
  load_stats(t);
  load_queries<T, Storage>(t);
  load_dout<T, Storage>(t);
  for (std::int32_t first = core::tile_begin(visible.begin, tile_k); first < visible.end;
       first += tile_k) {
    const KeyRange keys = core::intersect(visible, {first, first + tile_k});
    add_pairs(t, chunk, keys, keys.begin - block.begin, k_clean);
  }
}

/// Stores rows of dk or dv; rows past the sequence's keys are 0 in the accumulator.
template <typename T>
void store_keys(const BackwardTile<T>& t, void* to, core::Element element,
                const core::Strides& strides, std::int32_t head, const T* from,
                std::int64_t from_row, KeyRange keys, std::int32_t columns, T scale) {
  for (std::int32_t key = keys.begin; key < keys.end; ++key) {
    const std::int64_t at = core::row_offset(strides, t.b, head, t.sequence.k_row + key);
    for (std::int32_t c = 0; c < columns; ++c) {
      core::store_element(to, element, at + c * strides.column,
                          from[(key - keys.begin) * from_row + c] * scale);
    }
  }
}

/// Adds all rows of the group that see keys of a block.
template <typename T, typename Storage>
void add_group(BackwardTile<T>& t, std::int32_t chunk, std::int32_t head, KeyRange block) {
  const BackwardParams& p = t.p;
  const AttentionParams& f = p.fwd;
  const T* k_clean = t.k_tile;
  if (!load_keys<T, Storage>(t.k_tile, f.k, f.k_strides, t, head, block, f.head_dim)) {
    const std::int64_t count = static_cast<std::int64_t>(block.end - block.begin) * f.head_dim;
    for (std::int64_t i = 0; i < count; ++i) t.k_clean[i] = t.k_tile[i];
    make_finite(t.k_clean, count);
    k_clean = t.k_clean;
  }
  load_keys<T, Storage>(t.v_tile, f.v, f.v_strides, t, head, block, f.v_dim);
  const bool last_head = f.fault.is(InjectedFault::group_last_head_only);
  const std::int32_t drops = f.fault.is(InjectedFault::last_query_tile_dropped) ? 1 : 0;
  const std::int32_t q_tiles = (t.sequence.q_len + kTileRows - 1) / kTileRows - drops;
  for (std::int32_t g = last_head ? p.group - 1 : 0; g < p.group; ++g) {
    for (std::int32_t i = 0; i < q_tiles && !core::is_set(t.cancel); ++i) {
      if (select_rows(t, head * p.group + g, i)) add_rows<T, Storage>(t, chunk, block, k_clean);
    }
  }
}

/// All gradients of one block of KV tiles of a chunk.
template <typename T, typename Storage>
void process_block(BackwardTile<T>& t, std::int32_t chunk, std::int32_t head, std::int32_t first) {
  const BackwardParams& p = t.p;
  const AttentionParams& f = p.fwd;
  const std::int32_t block_k = f.tile_k * core::kBackwardBlockTiles;
  const KeyRange all = core::intersect({first, first + block_k}, chunk_keys(p, chunk));
  const KeyRange block = core::intersect(all, {0, t.sequence.kv_len});
  // Dense rows past the sequence's keys are written here, varlen rows were zeroed before.
  const bool varlen = f.cu_seqlens_k != nullptr;
  const bool whole = !varlen && !f.fault.is(InjectedFault::dk_tail_unwritten);
  const KeyRange written = whole ? core::intersect(all, {0, f.kv_len}) : block;
  if (written.empty()) return;
  fill(t.dk, block_k * t.q_row, T(0));
  fill(t.dv, block_k * t.v_row, T(0));
  if (!block.empty()) add_group<T, Storage>(t, chunk, head, block);
  if (core::is_set(t.cancel)) return;
  const T scale = static_cast<T>(p.scale);
  const T dk_scale = f.fault.is(InjectedFault::dk_scale_twice) ? scale * scale : scale;
  if (p.dk != nullptr) {
    store_keys(t, p.dk, p.dk_element, p.dk_strides, head, t.dk, t.q_row, written, f.head_dim,
               dk_scale);
  }
  if (p.dv != nullptr) {
    store_keys(t, p.dv, p.dv_element, p.dv_strides, head, t.dv, t.v_row, written, f.v_dim, T(1));
  }
}

template <typename T, typename Storage>
void pairs_step(BackwardTile<T>& t, std::int64_t index) {
  const BackwardParams& p = t.p;
  const auto chunk = static_cast<std::int32_t>(index % p.k_chunks);
  index /= p.k_chunks;
  const auto head = static_cast<std::int32_t>(index % p.fwd.kv_heads);
  t.b = static_cast<std::int32_t>(index / p.fwd.kv_heads);
  t.sequence = core::seq_info_of(p.fwd, t.b);
  const KeyRange keys = core::intersect(chunk_keys(p, chunk), {0, p.fwd.kv_len});
  for (std::int32_t first = keys.begin; first < keys.end && !core::is_set(t.cancel);
       first += p.fwd.tile_k * core::kBackwardBlockTiles) {
    process_block<T, Storage>(t, chunk, head, first);
  }
}

template <typename T>
void dq_step(BackwardTile<T>& t, std::int64_t index) {
  const BackwardParams& p = t.p;
  const AttentionParams& f = p.fwd;
  const auto tile = static_cast<std::int32_t>(index % f.q_tiles);
  index /= f.q_tiles;
  t.b = static_cast<std::int32_t>(index / f.q_heads);
  t.sequence = core::seq_info_of(f, t.b);
  if (!select_rows(t, static_cast<std::int32_t>(index % f.q_heads), tile)) return;
  T* sum = t.q_cols;  // [head_dim, kTileRows]
  const std::int64_t count = static_cast<std::int64_t>(f.head_dim) * kTileRows;
  fill(sum, count, T(0));
  for (std::int32_t chunk = 0; chunk < p.k_chunks; ++chunk) {
    if (core::intersect(keys_of_rows(t), chunk_keys(p, chunk)).empty()) continue;
    const T* partial = partial_of(t, chunk);
    for (std::int64_t i = 0; i < count; ++i) sum[i] += partial[i];
  }
  const T scale = f.fault.is(InjectedFault::dq_scale_missing) ? T(1) : static_cast<T>(p.scale);
  for (std::int32_t r = 0; r < t.rows; ++r) {
    const std::int64_t at =
        core::row_offset(p.dq_strides, t.b, t.h, t.sequence.q_row + t.first_row + r);
    for (std::int32_t d = 0; d < f.head_dim; ++d) {
      core::store_element(p.dq, p.dq_element, at + d * p.dq_strides.column,
                          sum[d * kTileRows + r] * scale);
    }
  }
}

/// acc[row][key] += dS of the selected rows; with one row of dbias, the sum over the rows.
template <typename T, typename Storage>
void add_to_dbias(BackwardTile<T>& t, std::int32_t first_key, T* acc) {
  const AttentionParams& f = t.p.fwd;
  const KeyRange keys = core::intersect(
      {first_key, first_key + f.tile_k},
      core::keys_seen_by_any(t.sequence.mask, t.first_row, t.first_row + t.rows - 1));
  if (keys.empty()) return;
  const std::int32_t count = keys.end - keys.begin, head = t.h / t.p.group;
  load_stats(t);
  load_queries<T, Storage>(t);
  load_dout<T, Storage>(t);
  load_keys<T, Storage>(t.k_tile, f.k, f.k_strides, t, head, keys, f.head_dim);
  load_keys<T, Storage>(t.v_tile, f.v, f.v_strides, t, head, keys, f.v_dim);
  compute_scores(t, t.k_tile, keys);
  compute_probabilities(t, count);
  compute_ds(t, t.v_tile, count, false);
  for (std::int32_t key = 0; key < count; ++key) {
    const T* ds = t.ds + key * kTileRows;
    T* to = acc + keys.begin - first_key + key;
    if (t.p.dbias_rows == 1) {
      T sum = T(0);
      for (std::int32_t r = 0; r < t.rows; ++r) sum += ds[r];
      *to += sum;
    } else {
      for (std::int32_t r = 0; r < t.rows; ++r) to[r * f.tile_k] += ds[r];
    }
  }
}

template <typename T, typename Storage>
void dbias_step(BackwardTile<T>& t, std::int64_t index) {
  const BackwardParams& p = t.p;
  const AttentionParams& f = p.fwd;
  const std::int32_t first_key = static_cast<std::int32_t>(index % p.k_tiles) * f.tile_k;
  index /= p.k_tiles;
  const std::int32_t row_tiles = (p.dbias_rows + kTileRows - 1) / kTileRows;
  const auto row_tile = static_cast<std::int32_t>(index % row_tiles);
  index /= row_tiles;
  const auto bias_head = static_cast<std::int32_t>(index % p.dbias_heads);
  const auto bias_batch = static_cast<std::int32_t>(index / p.dbias_heads);
  T* acc = t.dk;  // [kTileRows, tile_k]
  fill(acc, static_cast<std::int64_t>(kTileRows) * f.tile_k, T(0));
  const bool one_batch = p.dbias_batch > 1 || f.fault.is(InjectedFault::dbias_first_batch);
  const std::int32_t b_end = one_batch ? bias_batch + 1 : f.batch;
  const std::int32_t h_end = p.dbias_heads > 1 ? bias_head + 1 : f.q_heads;
  for (t.b = bias_batch; t.b < b_end; ++t.b) {
    t.sequence = core::seq_info_of(f, t.b);
    const std::int32_t q_tiles = (t.sequence.q_len + kTileRows - 1) / kTileRows;
    const bool one_row = p.dbias_rows == 1;
    for (std::int32_t h = bias_head; h < h_end; ++h) {
      for (std::int32_t i = one_row ? 0 : row_tile; i < (one_row ? q_tiles : row_tile + 1); ++i) {
        if (core::is_set(t.cancel)) return;
        if (select_rows(t, h, i)) add_to_dbias<T, Storage>(t, first_key, acc);
      }
    }
  }
  const std::int32_t first_row = row_tile * kTileRows;
  for (std::int32_t r = 0; r < kTileRows && first_row + r < p.dbias_rows; ++r) {
    const std::int64_t at = core::row_offset(p.dbias_strides, bias_batch, bias_head, first_row + r);
    for (std::int32_t key = 0; key < f.tile_k && first_key + key < f.kv_len; ++key) {
      core::store_element(p.dbias, p.dbias_element, at + (first_key + key) * p.dbias_strides.column,
                          acc[r * f.tile_k + key]);
    }
  }
}

template <typename T>
void dsinks_step(BackwardTile<T>& t, std::int64_t index) {
  const AttentionParams& f = t.p.fwd;
  t.h = static_cast<std::int32_t>(index);
  T total = T(0);
  if (f.sinks != nullptr) {  // a partial result has none
    const T sink = static_cast<T>(f.sinks[t.h * f.sinks_stride]);
    for (t.b = 0; t.b < f.batch && !core::is_set(t.cancel); ++t.b) {
      t.sequence = core::seq_info_of(f, t.b);
      for (std::int32_t i = 0; select_rows(t, t.h, i); ++i) {
        load_stats(t);
        T sum = T(0);
        for (std::int32_t r = 0; r < t.rows; ++r) {
          if (t.factor[r] == T(0)) continue;
          const T p = core::exp_scalar(sink - t.base[r]) * t.factor[r];
          if (p != T(0)) sum += p * t.delta[r];
        }
        total += sum;
      }
    }
  }
  if (!f.fault.is(InjectedFault::dsinks_sign_wrong)) total = -total;
  t.p.dsinks[t.h * t.p.dsinks_stride] = static_cast<float>(total);
}

template <typename T, typename Storage>
void backward_tile(const BackwardParams& params, core::BackwardStep step, std::int64_t index,
                   void* scratch, const std::int32_t* cancel) {
  BackwardTile<T> tile = make_tile<T>(params, scratch, cancel);
  switch (step) {
    case core::BackwardStep::row_stats: return row_stats_step<T, Storage>(tile, index);
    case core::BackwardStep::pairs: return pairs_step<T, Storage>(tile, index);
    case core::BackwardStep::dq: return dq_step<T>(tile, index);
    case core::BackwardStep::dbias: return dbias_step<T, Storage>(tile, index);
    case core::BackwardStep::dsinks: return dsinks_step<T>(tile, index);
  }
}

inline constexpr BackwardKernels kBackwardKernels = {
    backward_tile<float, float>, backward_tile<float, F16>, backward_tile<float, Bf16>,
    backward_tile<double, double>};

}  // namespace
}  // namespace flashcore::cpu
