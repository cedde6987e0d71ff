// Gradients of attention on the CPU, in steps that each write their own results:
//
//   row_stats  base, factor and delta of every row (core/backward_params.h)
//   dq         dQ = scale · Σ_j dZ_j K_j      tile: (batch, query head, 64 rows)
//   dkdv       dK = scale · Σ_i dZ_i Q_i,     tile: (batch, KV head, tile_k keys); sums over the
//              dV = Σ_i P_i dO_i              heads of the group and their rows, in this order
//   dbias      Σ dS over the repeated axes    tile: 64 rows × tile_k keys of dbias
//   dsinks     -Σ exp(sink - lse) · delta     tile: a query head
//
// Every sum has a fixed order, so the bits do not depend on the number of threads. The split form
// computes S and dP in both dq and dkdv, and needs neither atomics nor partial results.
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

// The rounding of a larger LSE would show in P. Such rows find their maximum and sum again.
inline constexpr double kLargestExactLse = 128;

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
  return t.factor[r] != T(0) && lse != core::negative_infinity<T>() &&
         (lse > T(kLargestExactLse) || lse < T(-kLargestExactLse));
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

/// dq[d][row] += Σ_key K[key][d] dZ[key][row] for one KV tile.
template <typename T, typename Storage>
void add_to_dq(BackwardTile<T>& t, KeyRange keys) {
  const AttentionParams& f = t.p.fwd;
  const std::int32_t head = t.h / t.p.group, count = keys.end - keys.begin;
  load_keys<T, Storage>(t.k_tile, f.k, f.k_strides, t, head, keys, f.head_dim);
  load_keys<T, Storage>(t.v_tile, f.v, f.v_strides, t, head, keys, f.v_dim);
  compute_scores(t, t.k_tile, keys);
  compute_probabilities(t, count);
  compute_ds(t, t.v_tile, count, true);
  make_finite(t.k_tile, static_cast<std::int64_t>(count) * f.head_dim);
  gemm<true>(Rows<T>{t.dq, kTileRows}, Scalars<T>{t.k_tile, 1, f.head_dim},
             Rows<T>{t.ds, kTileRows}, f.head_dim, t.row_vecs(), count);
}

template <typename T, typename Storage>
void dq_step(BackwardTile<T>& t, std::int64_t index) {
  const BackwardParams& p = t.p;
  const AttentionParams& f = p.fwd;
  // The last rows first: they are the longest, if causal.
  const std::int32_t tile = f.q_tiles - 1 - static_cast<std::int32_t>(index % f.q_tiles);
  index /= f.q_tiles;
  t.b = static_cast<std::int32_t>(index / f.q_heads);
  t.sequence = core::seq_info_of(f, t.b);
  if (!select_rows(t, static_cast<std::int32_t>(index % f.q_heads), tile)) return;
  load_stats(t);
  load_queries<T, Storage>(t);
  load_dout<T, Storage>(t);
  fill(t.dq, static_cast<std::int64_t>(f.head_dim) * kTileRows, T(0));
  const KeyRange visible =
      core::keys_seen_by_any(t.sequence.mask, t.first_row, t.first_row + t.rows - 1);
  for (std::int32_t first = visible.empty() ? visible.end
                                            : core::tile_begin(visible.begin, f.tile_k);
       first < visible.end; first += f.tile_k) {
    if (core::is_set(t.cancel)) return;
    const KeyRange keys = core::intersect(visible, {first, first + f.tile_k});
    add_to_dq<T, Storage>(t, keys);
    if (first == 0 && f.fault.is(InjectedFault::dq_tile_twice)) add_to_dq<T, Storage>(t, keys);
  }
  const T scale = f.fault.is(InjectedFault::dq_scale_missing) ? T(1) : static_cast<T>(p.scale);
  for (std::int32_t r = 0; r < t.rows; ++r) {
    const std::int64_t at =
        core::row_offset(p.dq_strides, t.b, t.h, t.sequence.q_row + t.first_row + r);
    for (std::int32_t d = 0; d < f.head_dim; ++d) {
      core::store_element(p.dq, p.dq_element, at + d * p.dq_strides.column,
                          t.dq[d * kTileRows + r] * scale);
    }
  }
}

/// Adds the rows of the tile to dk and dv of the keys [first_key, ...), whose K and V are loaded.
template <typename T, typename Storage>
void add_to_dkdv(BackwardTile<T>& t, KeyRange tile) {
  const AttentionParams& f = t.p.fwd;
  const KeyRange keys = core::intersect(
      tile, core::keys_seen_by_any(t.sequence.mask, t.first_row, t.first_row + t.rows - 1));
  if (keys.empty()) return;
  const std::int64_t offset = keys.begin - tile.begin;
  const std::int32_t count = keys.end - keys.begin;
  load_stats(t);
  load_queries<T, Storage>(t);
  load_dout<T, Storage>(t);
  compute_scores(t, t.k_tile + offset * f.head_dim, keys);
  compute_probabilities(t, count);
  if (t.p.dk != nullptr) {
    compute_ds(t, t.v_tile + offset * f.v_dim, count, true);
    gemm<true>(Rows<T>{t.dk + offset * t.q_row, t.q_row}, Scalars<T>{t.ds, kTileRows, 1},
               Rows<T>{t.q_rows, t.q_row}, count, (f.head_dim + kLanes<T> - 1) / kLanes<T>, t.rows);
  }
  if (t.p.dv != nullptr) {
    poison_probabilities(t, count);
    gemm<true>(Rows<T>{t.dv + offset * t.v_row, t.v_row}, Scalars<T>{t.prob, kTileRows, 1},
               Rows<T>{t.do_rows, t.v_row}, count, (f.v_dim + kLanes<T> - 1) / kLanes<T>, t.rows);
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

template <typename T, typename Storage>
void dkdv_step(BackwardTile<T>& t, std::int64_t index) {
  const BackwardParams& p = t.p;
  const AttentionParams& f = p.fwd;
  const auto first = static_cast<std::int32_t>(index % p.k_tiles) * f.tile_k;
  index /= p.k_tiles;
  const auto head = static_cast<std::int32_t>(index % f.kv_heads);
  t.b = static_cast<std::int32_t>(index / f.kv_heads);
  t.sequence = core::seq_info_of(f, t.b);
  const KeyRange all{first, first + f.tile_k};
  const KeyRange tile = core::intersect(all, {0, t.sequence.kv_len});
  // Dense rows past the sequence's keys are written here, varlen rows were zeroed before.
  const bool varlen = f.cu_seqlens_k != nullptr;
  const bool whole = !varlen && !f.fault.is(InjectedFault::dk_tail_unwritten);
  const KeyRange written = whole ? core::intersect(all, {0, f.kv_len}) : tile;
  if (written.empty()) return;
  fill(t.dk, f.tile_k * t.q_row, T(0));
  fill(t.dv, f.tile_k * t.v_row, T(0));
  if (!tile.empty()) {
    load_keys<T, Storage>(t.k_tile, f.k, f.k_strides, t, head, tile, f.head_dim);
    load_keys<T, Storage>(t.v_tile, f.v, f.v_strides, t, head, tile, f.v_dim);
    const bool last_head = f.fault.is(InjectedFault::group_last_head_only);
    const std::int32_t drops = f.fault.is(InjectedFault::last_query_tile_dropped) ? 1 : 0;
    const std::int32_t q_tiles = (t.sequence.q_len + kTileRows - 1) / kTileRows - drops;
    for (std::int32_t g = last_head ? p.group - 1 : 0; g < p.group; ++g) {
      for (std::int32_t i = 0; i < q_tiles; ++i) {
        if (core::is_set(t.cancel)) return;
        if (select_rows(t, head * p.group + g, i)) add_to_dkdv<T, Storage>(t, tile);
      }
    }
  }
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
    case core::BackwardStep::dq: return dq_step<T, Storage>(tile, index);
    case core::BackwardStep::dkdv: return dkdv_step<T, Storage>(tile, index);
    case core::BackwardStep::dbias: return dbias_step<T, Storage>(tile, index);
    case core::BackwardStep::dsinks: return dsinks_step<T>(tile, index);
  }
}

inline constexpr BackwardKernels kBackwardKernels = {
    backward_tile<float, float>, backward_tile<float, F16>, backward_tile<float, Bf16>,
    backward_tile<double, double>};

}  // namespace
}  // namespace flashcore::cpu
