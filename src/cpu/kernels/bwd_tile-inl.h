// A work tile of the CPU kernels for gradients: rows of one query head and keys of one KV head. The
// functions here load it and compute P and dS of its pairs.
//
//   P  = exp(S - base) · factor       S: scores with all modifications
//   dS = P · (dP - delta)             dP = dO Vᵀ
//   dZ = dS · (1 - tanh²)             with a softcap; otherwise dS
//
// Lanes are query rows, as in the forward: all matrices of pairs are transposed, [key][row].
// A pair with P = 0 contributes nothing, whatever its operands contain.
#pragma once

#include "core/backward_params.h"
#include "core/backward_scratch.h"
#include "core/row_offset.h"
#include "core/score.h"
#include "core/seq_info.h"
#include "core/softmax.h"
#include "cpu/kernels/bwd_gemm-inl.h"
#include "cpu/kernels/load-inl.h"
#include "cpu/kernels/score-inl.h"
#include "cpu/kernels/simd.h"

namespace flashcore::cpu {
namespace {

using core::BackwardParams;

inline constexpr std::int32_t kTileRows = core::kBackwardTileQ;
template <typename T>
inline constexpr int kRowVecs = kTileRows / kLanes<T>;

/// Rows [first_row, first_row + rows) of query head h, and its scratch memory
/// (core::BackwardScratch).
template <typename T>
struct BackwardTile {
  const BackwardParams& p;
  const std::int32_t* cancel;
  T *q_rows, *q_cols, *do_rows, *do_cols, *k_tile, *v_tile, *prob, *ds, *slope, *k_clean, *dk, *dv;
  T *base, *factor, *delta, *poison;
  std::int64_t q_row, v_row;  // lengths of padded rows
  core::SeqInfo sequence{};
  std::int32_t b = 0, h = 0, first_row = 0, rows = 0;
  bool poisoned = false;  // a row of dout is not finite

  std::int32_t row_vecs() const { return (rows + kLanes<T> - 1) / kLanes<T>; }
  std::int64_t stats_index(std::int32_t row) const {
    return core::partial_row(p.fwd, b, h, sequence.q_row, first_row + row);
  }
};

template <typename T>
BackwardTile<T> make_tile(const BackwardParams& p, void* scratch, const std::int32_t* cancel) {
  const core::BackwardScratch at =
      core::backward_scratch(p.fwd.tile_q, p.fwd.tile_k, p.fwd.head_dim, p.fwd.v_dim);
  T* s = static_cast<T*>(scratch);
  return {.p = p,
          .cancel = cancel,
          .q_rows = s + at.q_rows,
          .q_cols = s + at.q_cols,
          .do_rows = s + at.do_rows,
          .do_cols = s + at.do_cols,
          .k_tile = s + at.k_tile,
          .v_tile = s + at.v_tile,
          .prob = s + at.p,
          .ds = s + at.ds,
          .slope = s + at.slope,
          .k_clean = s + at.k_clean,
          .dk = s + at.dk,
          .dv = s + at.dv,
          .base = s + at.base,
          .factor = s + at.factor,
          .delta = s + at.delta,
          .poison = s + at.poison,
          .q_row = core::padded_row(p.fwd.head_dim),
          .v_row = core::padded_row(p.fwd.v_dim)};
}

/// Selects the rows of query tile `index` of head h. Returns false if the sequence has none there.
template <typename T>
bool select_rows(BackwardTile<T>& t, std::int32_t h, std::int32_t index) {
  t.h = h;
  t.first_row = index * kTileRows;
  const std::int32_t left = t.sequence.q_len - t.first_row;
  t.rows = left < kTileRows ? left : kTileRows;
  return t.rows > 0;
}

template <typename T>
FLASHCORE_HD bool is_finite(T x) {
  return x - x == T(0);
}

template <typename T>
void fill(T* to, std::int64_t count, T value) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = value;
}

/// Widens one strided row. Returns false if an element is not finite.
template <typename T, typename Storage>
bool load_row(T* to, const Storage* from, std::int64_t stride, std::int32_t columns) {
  if (stride == 1) {
    for (std::int32_t c = 0; c < columns; ++c) to[c] = widen<T>(from[c]);
  } else {
    for (std::int32_t c = 0; c < columns; ++c) to[c] = widen<T>(from[c * stride]);
  }
  Vec<T> sum = splat(T(0));  // x - x is 0, or NaN if x is not finite
  std::int32_t c = 0;
  for (; c + kLanes<T> <= columns; c += kLanes<T>) sum = sum + (load(to + c) - load(to + c));
  T lanes[kLanes<T>];
  store(lanes, sum);
  T total = T(0);
  for (; c < columns; ++c) total += to[c] - to[c];
  for (const T lane : lanes) total += lane;
  return total == T(0);
}

/// load_row() of a tensor in the kernel's type or in f32.
template <typename T, typename Storage>
bool load_any_row(T* to, const void* data, core::Element element, std::int64_t at,
                  std::int64_t stride, std::int32_t columns) {
  if (element == core::Element::f32) {
    return load_row(to, static_cast<const float*>(data) + at, stride, columns);
  }
  return load_row(to, static_cast<const Storage*>(data) + at, stride, columns);
}

/// cols[c][row] = rows[row][c] * factor. Rows from `rows` on become 0.
template <typename T>
void transpose(T* cols, const T* from, std::int64_t from_row, std::int32_t rows,
               std::int32_t columns, T factor) {
  constexpr std::int32_t kBlock = 8;
  if (rows < kTileRows) fill(cols, static_cast<std::int64_t>(columns) * kTileRows, T(0));
  for (std::int32_t c0 = 0; c0 < columns; c0 += kBlock) {
    const std::int32_t c1 = c0 + kBlock < columns ? c0 + kBlock : columns;
    for (std::int32_t r = 0; r < rows; ++r) {
      for (std::int32_t c = c0; c < c1; ++c) {
        cols[c * kTileRows + r] = from[r * from_row + c] * factor;
      }
    }
  }
}

/// Replaces numbers that are not finite by 0.
template <typename T>
void make_finite(T* x, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) x[i] = is_finite(x[i]) ? x[i] : T(0);
}

template <typename T>
void load_stats(BackwardTile<T>& t) {
  for (std::int32_t r = 0; r < kTileRows; ++r) {
    const bool used = r < t.rows;
    const std::int64_t at = used ? t.stats_index(r) : 0;
    t.base[r] = used ? static_cast<const T*>(t.p.row_base)[at] : T(0);
    t.factor[r] = used ? static_cast<const T*>(t.p.row_factor)[at] : T(0);
    t.delta[r] = used ? static_cast<const T*>(t.p.row_delta)[at] : T(0);
  }
  const core::Fault fault = t.p.fwd.fault;
  if (fault.is(InjectedFault::delta_ignored)) fill(t.delta, kTileRows, T(0));
  if (fault.is(InjectedFault::delta_of_next_row)) {
    for (std::int32_t r = 0; r + 1 < t.rows; ++r) t.delta[r] = t.delta[r + 1];
  }
}

/// Loads q: q_cols, scaled, for scores, and q_rows for dK. Rows without keys become 0.
template <typename T, typename Storage>
void load_queries(BackwardTile<T>& t) {
  const AttentionParams& f = t.p.fwd;
  bool finite = true;
  for (std::int32_t r = 0; r < t.rows; ++r) {
    T* to = t.q_rows + r * t.q_row;
    const bool empty = t.factor[r] == T(0);
    fill(to + (empty ? 0 : f.head_dim), t.q_row - (empty ? 0 : f.head_dim), T(0));
    if (empty) continue;
    const std::int64_t at =
        core::row_offset(f.q_strides, t.b, t.h, t.sequence.q_row + t.first_row + r);
    finite &= load_row(to, static_cast<const Storage*>(f.q) + at, f.q_strides.column, f.head_dim);
  }
  transpose(t.q_cols, t.q_rows, t.q_row, t.rows, f.head_dim, core::score_scale<T>(f));
  if (!finite) make_finite(t.q_rows, t.rows * t.q_row);
}

/// Loads dout: do_cols for dP, and do_rows for dV. Rows without keys become 0.
template <typename T, typename Storage>
void load_dout(BackwardTile<T>& t) {
  const AttentionParams& f = t.p.fwd;
  const core::Strides& strides = t.p.dout_strides;
  t.poisoned = false;
  fill(t.poison, kTileRows, T(0));
  for (std::int32_t r = 0; r < t.rows; ++r) {
    T* to = t.do_rows + r * t.v_row;
    const bool empty = t.factor[r] == T(0);
    fill(to + (empty ? 0 : f.v_dim), t.v_row - (empty ? 0 : f.v_dim), T(0));
    if (empty) continue;
    const std::int64_t at = core::row_offset(strides, t.b, t.h, t.sequence.q_row + t.first_row + r);
    if (!load_any_row<T, Storage>(to, t.p.dout, t.p.dout_element, at, strides.column, f.v_dim)) {
      t.poison[r] = static_cast<T>(__builtin_nanf(""));
      t.poisoned = true;
    }
  }
  transpose(t.do_cols, t.do_rows, t.v_row, t.rows, f.v_dim, T(1));
  if (t.poisoned) make_finite(t.do_rows, t.rows * t.v_row);
}

/// Loads keys of KV head `head` to tile[key][column]. Returns false if one is not finite.
template <typename T, typename Storage>
bool load_keys(T* tile, const void* data, const core::Strides& strides, const BackwardTile<T>& t,
               std::int32_t head, KeyRange keys, std::int32_t columns) {
  bool finite = true;
  for (std::int32_t key = keys.begin; key < keys.end; ++key) {
    const std::int64_t at = core::row_offset(strides, t.b, head, t.sequence.k_row + key);
    finite &= load_row(tile + static_cast<std::int64_t>(key - keys.begin) * columns,
                       static_cast<const Storage*>(data) + at, strides.column, columns);
  }
  return finite;
}

/// The tile as the forward's functions for scores take it. They do not use its scratch memory.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
template <typename T>
WorkTile<T> score_tile(const BackwardTile<T>& t) {
  core::SeqInfo sequence = t.sequence;
  if (t.p.fwd.fault.is(InjectedFault::bwd_mask_ignored)) {
    sequence.mask.left = sequence.mask.right = -1;
  }
  return {.params = t.p.fwd,
          .cancel = t.cancel,
          .sequence = sequence,
          .b = t.b,
          .kv_head = t.h,  // the group is 1
          .split = 0,
          .first_row = t.first_row,
          .rows = t.rows};
}
#pragma GCC diagnostic pop

/// prob[key][row] = S, with all modifications; slope = 1 - tanh² with a softcap. `k` is the first
/// of `keys` in the tile.
template <typename T>
void compute_scores(BackwardTile<T>& t, const T* k, KeyRange keys) {
  const AttentionParams& f = t.p.fwd;
  const std::int32_t count = keys.end - keys.begin;
  gemm<false>(Rows<T>{t.prob, kTileRows}, Scalars<T>{k, f.head_dim, 1},
              Rows<T>{t.q_cols, kTileRows}, count, t.row_vecs(), f.head_dim);
  if (f.softcap > 0) {
    const T cap = static_cast<T>(f.softcap);
    const Vec<T> one = splat(T(1)), over_cap = splat(T(1) / cap);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(count) * kTileRows; i += kLanes<T>) {
      const Vec<T> tanh = VecScoreMath<T>::capped(load(t.prob + i), cap) * over_cap;
      store(t.slope + i, one - tanh * tanh);
    }
  }
  apply_mods_and_mask<kRowVecs<T>>(score_tile(t), t.prob, 0, keys);
}

/// Scores become P. A hidden key has exactly 0, and so have all keys of a row whose factor is 0.
template <typename T>
void compute_probabilities(BackwardTile<T>& t, std::int32_t keys) {
  const Vec<T> lowest = splat(sizeof(T) == 4 ? T(-__FLT_MAX__) : T(-__DBL_MAX__));
  const Vec<T> zero = splat(T(0));
  const Vec<T> limit = splat(T(69));  // of exp(); P is at most 1 if lse belongs to the inputs
  for (std::int32_t v = 0; v < t.row_vecs(); ++v) {
    const Vec<T> base = load(t.base + v * kLanes<T>), factor = load(t.factor + v * kLanes<T>);
    for (std::int32_t key = 0; key < keys; ++key) {
      T* at = t.prob + key * kTileRows + v * kLanes<T>;
      const Vec<T> score = load(at);
      const Vec<T> power = score - base;
      const Vec<T> p = exp<T>(select_less(limit, power, limit, power)) * factor;
      // A row without keys may have scores that are NaN, because its q was replaced by 0.
      const Vec<T> guarded = select_less(score, lowest, zero, select_less(zero, factor, p, factor));
      store(at, t.p.fwd.fault.is(InjectedFault::empty_row_unguarded) ? p : guarded);
    }
  }
}

/// ds = dS, or dZ if `with_slope`, from P. `v` is the first of `keys` in the tile.
template <typename T>
void compute_ds(BackwardTile<T>& t, const T* v, std::int32_t keys, bool with_slope) {
  const AttentionParams& f = t.p.fwd;
  gemm<false>(Rows<T>{t.ds, kTileRows}, Scalars<T>{v, f.v_dim, 1}, Rows<T>{t.do_cols, kTileRows},
              keys, t.row_vecs(), f.v_dim);
  const Vec<T> zero = splat(T(0));
  const bool capped =
      with_slope && f.softcap > 0 && !f.fault.is(InjectedFault::softcap_slope_ignored);
  for (std::int32_t lane = 0; lane < t.row_vecs() * kLanes<T>; lane += kLanes<T>) {
    const Vec<T> delta = load(t.delta + lane);
    for (std::int32_t key = 0; key < keys; ++key) {
      const std::int64_t at = key * kTileRows + lane;
      const Vec<T> p = load(t.prob + at);
      Vec<T> ds = p * (load(t.ds + at) - delta);
      if (capped) ds = ds * load(t.slope + at);
      store(t.ds + at, select_less(zero, p, ds, p));  // P is 0, positive or NaN
    }
  }
}

/// Makes P NaN where a row of dout is not finite, because do_rows has 0 there.
template <typename T>
void poison_probabilities(BackwardTile<T>& t, std::int32_t keys) {
  if (!t.poisoned) return;
  for (std::int32_t key = 0; key < keys; ++key) {
    for (std::int32_t r = 0; r < t.rows; ++r) {
      T& p = t.prob[key * kTileRows + r];
      if (p != T(0)) p = p + t.poison[r];
    }
  }
}

}  // namespace
}  // namespace flashcore::cpu
