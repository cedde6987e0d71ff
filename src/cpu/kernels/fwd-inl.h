// Attention forward on the CPU: softmax(Q K^T) V for one work item, with online softmax.
//
//   item    (batch, KV head, block of tile_q rows, key range). The rows of a block are the queries
//           of all heads of the GQA group, query-major, so K and V are read once per group.
//   lanes   are query rows. Scores are kept transposed, S^T[key][row], so a row's maximum, sum and
//           rescaling are plain lane-wise operations and nothing is ever reduced across lanes.
//   GEMMs   S^T = K Q^T and O^T += V^T P^T. Both broadcast scalars of K or V against vectors of
//           rows; neither operand needs packing beyond widening to the compute type.
//   panel   kPanel rows = kPanelVecs vectors: the rows whose accumulators fit in registers.
//
// Included by kernel_<isa>.cc, once per instruction set. See simd.h for why nothing here may come
// from the standard library or have external linkage.
#pragma once

#include "core/assert.h"
#include "core/cancel.h"
#include "core/element.h"
#include "core/mask.h"
#include "core/params.h"
#include "core/quant_formats.h"
#include "core/row_offset.h"
#include "core/score.h"
#include "core/scratch.h"
#include "core/seq_info.h"
#include "core/softmax.h"
#include "cpu/kernel.h"
#include "cpu/kernels/simd.h"

namespace flashcore::cpu {
namespace {

using core::AttentionParams;
using core::InjectedFault;
using core::KeyRange;

// Register tile: kPanelVecs vectors of rows times kBroadcasts keys (or columns of V).
#if FLASHCORE_SIMD_BYTES == 64
inline constexpr int kPanelVecs = 2, kBroadcasts = 12;
#elif FLASHCORE_SIMD_BYTES == 32
inline constexpr int kPanelVecs = 2, kBroadcasts = 6;
#elif FLASHCORE_SIMD_BYTES == 16
inline constexpr int kPanelVecs = 4, kBroadcasts = 4;
#else
inline constexpr int kPanelVecs = 2, kBroadcasts = 4;
#endif

/// One vector of rows leaves registers for more keys, which hides the latency of the additions.
template <int V>
inline constexpr int kBroadcastsOf = V == 1 ? 12 : kBroadcasts;

/// A work item's place in the problem.
template <typename T>
struct Block {
  const AttentionParams& params;
  const std::int32_t* cancel;
  core::SeqInfo sequence;
  std::int32_t b, kv_head, split;
  std::int64_t first_row;  // of the group's q_len * group rows
  std::int32_t rows;
  // Scratch, see scratch.h. A panel of kPanel rows is contiguous: [head_dim][kPanel].
  T* q_tile;
  T* k_tile;
  T* v_tile;
  T* scores;
  T* out_tile;
  T* max;
  T* sum;

  std::int32_t query_of(std::int32_t row) const {
    return static_cast<std::int32_t>((first_row + row) / params.group);
  }
  std::int32_t head_of(std::int32_t row) const {
    const auto in_group = static_cast<std::int32_t>((first_row + row) % params.group);
    if (params.fault.is(InjectedFault::gqa_map_wrong)) return in_group * params.kv_heads + kv_head;
    return kv_head * params.group + in_group;
  }
};

// ---------------------------------------------------------------------------------------------
// Loading

// The values of the 8-bit formats, in steps.
inline constexpr core::CodeTable kE4m3Values = core::code_table(core::Element::e4m3);
inline constexpr core::CodeTable kE5m2Values = core::code_table(core::Element::e5m2);
inline constexpr core::CodeTable kInt8Values = core::code_table(core::Element::int8);
inline constexpr core::CodeTable kByteValues = core::code_table(core::Element::u8);

const float* values_of(core::Element element) {
  switch (element) {
    case core::Element::e4m3: return kE4m3Values.value;
    case core::Element::e5m2: return kE5m2Values.value;
    case core::Element::int8: return kInt8Values.value;
    default: return kByteValues.value;
  }
}

/// Calls copy_row(tile row, row in memory, key) for the keys [first, first + count) of one head's K
/// or V.
template <typename T, typename Storage, typename CopyRow>
void for_each_key(T* tile, const Storage* g_head, const core::Strides& strides,
                  const core::KvRowMap& kv_row_map, std::int32_t first, std::int32_t count,
                  std::int32_t columns, CopyRow copy_row) {
  const Storage* from = g_head;
  std::int32_t run_end = 0;  // up to here the rows follow each other
  for (std::int32_t r = 0; r < count; ++r, from += strides.row) {
    if (r == run_end) {
      const core::KvLocation place = kv_row_map.at(first + r);
      from = g_head + place.block * strides.batch + place.row * strides.row;
      const std::int32_t run = kv_row_map.run_from(first + r);
      run_end = run < count - r ? r + run : count;
    }
    copy_row(tile + static_cast<std::int64_t>(r) * columns, from, first + r);
  }
}

/// K or V as stored: of the kernel's type, or 8-bit with scales.
struct KeyTensor {
  const void* g_data;
  const core::Strides& strides;
  core::Element element;
  const core::Scales& scales;
  std::int32_t columns;
};

/// Copies the keys of a tile into tile[keys][columns], widened to the values they stand for.
template <typename T, typename Storage>
void load_tile(T* tile, const KeyTensor& t, const Block<T>& block, const core::KvRowMap& kv_row_map,
               KeyRange keys) {
  const core::Strides& strides = t.strides;
  const std::int32_t columns = t.columns, count = keys.end - keys.begin;
  const std::int64_t head = block.kv_head * strides.head;
  if (core::is_8bit(t.element)) {
    const float* values = values_of(t.element);
    const std::uint32_t mask = core::code_mask(block.params) & 0xff;
    for_each_key(
        tile, static_cast<const std::uint8_t*>(t.g_data) + head, strides, kv_row_map, keys.begin,
        count, columns, [&](T* to, const std::uint8_t* from, std::int32_t key) {
          const float step =
              core::row_scale(block.params, t.element, t.scales, block.b, block.kv_head, key);
          for (std::int32_t c = 0; c < columns; ++c) {
            to[c] = static_cast<T>(values[from[c * strides.column] & mask] * step);
          }
        });
    return;
  }
  for_each_key(tile, static_cast<const Storage*>(t.g_data) + head, strides, kv_row_map, keys.begin,
               count, columns, [&](T* to, const Storage* from, std::int32_t) {
                 std::int32_t c = 0;
                 if (strides.column == 1) {
                   for (; c + kLanes<T> <= columns; c += kLanes<T>) widen_lanes(to + c, from + c);
                 }
                 for (; c < columns; ++c) to[c] = widen<T>(from[c * strides.column]);
               });
}

/// Q of the block, scaled and transposed: q_tile[panel][d][row in panel]. Rows past the end are 0.
template <typename T, typename Storage>
void load_queries(const Block<T>& block, int panel_rows) {
  const AttentionParams& p = block.params;
  const T factor = core::score_scale<T>(p);
  for (std::int32_t row = 0; row < p.tile_q; ++row) {
    T* to = block.q_tile + static_cast<std::int64_t>(row / panel_rows) * panel_rows * p.head_dim +
            row % panel_rows;
    if (row >= block.rows) {
      if (row % panel_rows == 0) break;  // no panel beyond the last one in use
      for (std::int32_t d = 0; d < p.head_dim; ++d) to[d * panel_rows] = T(0);
      continue;
    }
    const std::int32_t head = block.head_of(row), query = block.query_of(row);
    const std::int64_t at =
        core::row_offset(p.q_strides, block.b, head, block.sequence.q_row + query);
    if (core::is_8bit(p.q_element)) {
      const std::uint8_t* from = static_cast<const std::uint8_t*>(p.q) + at;
      const float* values = values_of(p.q_element);
      const float step = core::row_scale(p, p.q_element, p.q_scale, block.b, head, query);
      const std::uint32_t mask = core::code_mask(p) & 0xff;
      for (std::int32_t d = 0; d < p.head_dim; ++d) {
        to[d * panel_rows] =
            static_cast<T>(values[from[d * p.q_strides.column] & mask] * step) * factor;
      }
    } else {
      const Storage* from = static_cast<const Storage*>(p.q) + at;
      for (std::int32_t d = 0; d < p.head_dim; ++d) {
        to[d * panel_rows] = widen<T>(from[d * p.q_strides.column]) * factor;
      }
    }
    if (p.fault.is(InjectedFault::head_dim_truncated)) to[(p.head_dim - 1) * panel_rows] = T(0);
  }
}

// ---------------------------------------------------------------------------------------------
// Matrix products

/// acc[m][v] = Σ_i scalars[m * scalar_stride + i * step_stride] * vectors[i][v].
template <int M, int V, typename T>
FLASHCORE_HD void multiply_accumulate(Vec<T> (&acc)[M][V], const T* scalars,
                                      std::int64_t scalar_stride, std::int64_t step_stride,
                                      const T* vectors, std::int32_t steps) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) acc[m][v] = splat(T(0));
  }
  for (std::int32_t i = 0; i < steps; ++i) {
    Vec<T> row[V];
    for (int v = 0; v < V; ++v) row[v] = load(vectors + v * kLanes<T>);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Vec<T> scalar = splat(scalars[m * scalar_stride]);
      for (int v = 0; v < V; ++v) acc[m][v] = acc[m][v] + scalar * row[v];
    }
    scalars += step_stride;
    vectors += V * kLanes<T>;
  }
}

/// scores[key][row] = K[key] · Q[row] for the keys of a tile and one panel of rows.
template <int V, typename T>
void score_panel(T* scores, const T* k_tile, const T* q_panel, std::int32_t keys,
                 std::int32_t head_dim) {
  constexpr int kRows = V * kLanes<T>;
  std::int32_t key = 0;
  const auto step = [&]<int M>() {
    Vec<T> acc[M][V];
    multiply_accumulate<M, V, T>(acc, k_tile + static_cast<std::int64_t>(key) * head_dim, head_dim,
                                 1, q_panel, head_dim);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < V; ++v) store(scores + (key + m) * kRows + v * kLanes<T>, acc[m][v]);
    }
    key += M;
  };
  while (key + kBroadcastsOf<V> <= keys) step.template operator()<kBroadcastsOf<V>>();
  while (key + 4 <= keys) step.template operator()<4>();
  while (key < keys) step.template operator()<1>();
}

/// out[column][row] = out[column][row] * rescale[row] + Σ_key V[key][column] P[key][row].
template <int V, typename T>
void value_panel(T* out_panel, const T* v_tile, const T* probabilities, const Vec<T> (&rescale)[V],
                 std::int32_t keys, std::int32_t v_dim) {
  constexpr int kRows = V * kLanes<T>;
  std::int32_t column = 0;
  const auto step = [&]<int M>() {
    Vec<T> acc[M][V];
    multiply_accumulate<M, V, T>(acc, v_tile + column, 1, v_dim, probabilities, keys);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < V; ++v) {
        T* out = out_panel + (column + m) * kRows + v * kLanes<T>;
        store(out, load(out) * rescale[v] + acc[m][v]);
      }
    }
    column += M;
  };
  while (column + kBroadcastsOf<V> <= v_dim) step.template operator()<kBroadcastsOf<V>>();
  while (column + 4 <= v_dim) step.template operator()<4>();
  while (column < v_dim) step.template operator()<1>();
}

// ---------------------------------------------------------------------------------------------
// Scores: softcap, ALiBi, bias, masks. Order and meaning are in docs/numerics.md.

/// Softcap and absolute value of vectors.
template <typename T>
struct VecScoreMath {
  FLASHCORE_HD static Vec<T> absolute(Vec<T> x) { return cpu::absolute(x); }

  FLASHCORE_HD static Vec<T> softcap(Vec<T> argument, T cap) {
    if (cap > T(core::kLargestShortCap)) {
      T lane[kLanes<T>];
      store(lane, argument);
      for (T& x : lane) x = core::capped(x, cap);
      return load(lane);
    }
    const Vec<T> one = splat(T(1)), two = splat(T(2)), zero = splat(T(0));
    const Vec<T> limit = splat(T(100));  // of exp2; tanh is ±1 to the last bit long before
    Vec<T> x = select_less(limit, argument, limit, argument);
    x = select_less(x, zero - limit, zero - limit, x);
    return splat(cap) * (one - two / (one + exp2(x)));
  }
};

/// core::ScoreRow of a vector of rows.
template <typename T>
struct ScoreRowVec {
  T cap;
  Vec<T> slope;
  bool has_alibi;
  const void* bias;
  core::Element bias_element;
  std::int64_t bias_stride;
  const std::uint8_t* mask;
  std::int64_t mask_stride;
  core::Fault fault;
  std::int64_t bias_offset[kLanes<T>], mask_offset[kLanes<T>];

  /// Rows first_row and following of the block. Lanes past its end repeat the last row.
  ScoreRowVec(const Block<T>& block, std::int32_t first_row) {
    T slopes[kLanes<T>];
    for (int lane = 0; lane < kLanes<T>; ++lane) {
      const std::int32_t row = first_row + lane < block.rows ? first_row + lane : block.rows - 1;
      const core::ScoreRow<T> one =
          core::score_row<T>(block.params, block.b, block.head_of(row), block.query_of(row));
      if (lane == 0) {
        cap = one.cap, has_alibi = one.has_alibi;
        bias = one.bias, bias_element = one.bias_element, bias_stride = one.bias_stride;
        mask = one.mask, mask_stride = one.mask_stride;
        fault = one.fault;
      }
      slopes[lane] = one.slope;
      bias_offset[lane] = one.bias_offset;
      mask_offset[lane] = one.mask_offset;
    }
    slope = load(slopes);
  }

  FLASHCORE_HD bool has_softcap() const { return cap > T(0); }
  FLASHCORE_HD bool has_bias() const { return bias != nullptr; }
  FLASHCORE_HD bool has_mask() const { return mask != nullptr; }

  template <typename Use>
  FLASHCORE_HD void with_bias(Use use) const {
    const auto gather = [this]<core::Element kElement>(std::int32_t key) {
      T lane[kLanes<T>];
      for (int i = 0; i < kLanes<T>; ++i) {
        lane[i] = core::load_element<T>(bias, kElement, bias_offset[i] + key * bias_stride);
      }
      return load(lane);
    };
    const auto use_format = [&]<core::Element kElement>() {
      use([&](std::int32_t key) { return gather.template operator()<kElement>(key); });
    };
    switch (bias_element) {
      case core::Element::f64: return use_format.template operator()<core::Element::f64>();
      case core::Element::f32: return use_format.template operator()<core::Element::f32>();
      case core::Element::f16: return use_format.template operator()<core::Element::f16>();
      default: return use_format.template operator()<core::Element::bf16>();
    }
  }
  FLASHCORE_HD Vec<T> masked(Vec<T> score, std::int32_t key) const {
    T visible[kLanes<T>];
    for (int i = 0; i < kLanes<T>; ++i) {
      visible[i] = static_cast<T>(mask[mask_offset[i] + key * mask_stride]);
    }
    return select_less(splat(T(0)), load(visible), score, splat(core::negative_infinity<T>()));
  }
};

/// Modifies the scores of one vector of rows, from first_row on: scores[key * stride].
template <typename T>
void modify_vector(const Block<T>& block, T* scores, std::int32_t stride, std::int32_t first_row,
                   KeyRange tile) {
  const ScoreRowVec<T> row(block, first_row);
  T distances[kLanes<T>];  // of the tile's first key
  for (int lane = 0; lane < kLanes<T>; ++lane) {
    distances[lane] = static_cast<T>(block.query_of(first_row + lane) +
                                     block.sequence.mask.diagonal - tile.begin);
  }
  const Vec<T> first_distance = load(distances);
  core::modify_scores<VecScoreMath<T>, core::ScoreInput::scaled>(row, [&](auto change) {
    for (std::int32_t key = 0; key < tile.end - tile.begin; ++key) {
      Vec<T> score = load(scores + key * stride);
      change(score, tile.begin + key, first_distance - splat(static_cast<T>(key)));
      store(scores + key * stride, score);
    }
  });
}

/// -inf outside each row's interval of visible keys.
template <int V, typename T>
void apply_key_ranges(const Block<T>& block, T* scores, std::int32_t panel_row, KeyRange tile) {
  constexpr int kRows = V * kLanes<T>;
  T begin[kRows], end[kRows];  // relative to the tile, where T is exact
  const std::int32_t keys = tile.end - tile.begin;
  for (int r = 0; r < kRows; ++r) {
    begin[r] = T(0), end[r] = static_cast<T>(keys);
    if (panel_row + r >= block.rows) continue;
    const KeyRange seen = core::visible_keys(block.sequence.mask, block.query_of(panel_row + r));
    const KeyRange here = core::intersect(seen, tile);
    begin[r] = static_cast<T>(here.begin - tile.begin);
    end[r] = static_cast<T>(here.end - tile.begin);
  }
  const Vec<T> hidden = splat(core::negative_infinity<T>());
  for (std::int32_t key = 0; key < keys; ++key) {
    const Vec<T> position = splat(static_cast<T>(key));
    for (int v = 0; v < V; ++v) {
      T* s = scores + (key * V + v) * kLanes<T>;
      const Vec<T> x = select_less(position, load(begin + v * kLanes<T>), hidden, load(s));
      store(s, select_less(position, load(end + v * kLanes<T>), x, hidden));
    }
  }
}

template <int V, typename T>
void apply_mods_and_mask(const Block<T>& block, T* scores, std::int32_t panel_row, KeyRange tile) {
  const AttentionParams& p = block.params;
  if (core::needs_general_path(p, core::kElementMods)) {
    for (int v = 0; v < V; ++v) {
      modify_vector(block, scores + v * kLanes<T>, V * kLanes<T>, panel_row + v * kLanes<T>, tile);
    }
  }

  const std::int32_t last_row =
      (panel_row + V * kLanes<T> < block.rows ? panel_row + V * kLanes<T> : block.rows) - 1;
  const KeyRange all = core::keys_seen_by_all(block.sequence.mask, block.query_of(panel_row),
                                              block.query_of(last_row));
  if (tile.begin < all.begin || tile.end > all.end) {
    apply_key_ranges<V>(block, scores, panel_row, tile);
  }
}

// ---------------------------------------------------------------------------------------------
// Online softmax

/// Turns scores into probabilities relative to the running maximum, updates max and sum, and
/// returns by how much earlier results shrink.
template <int V, typename T>
void softmax_panel(T* scores, std::int32_t keys, T* max, T* sum, Vec<T> (&rescale)[V],
                   core::Fault fault) {
  for (int v = 0; v < V; ++v) {
    const T* column = scores + v * kLanes<T>;
    const Vec<T> old_max = load(max + v * kLanes<T>);
    // Two chains hide the latency of compare-and-select; the maximum does not depend on order.
    Vec<T> even = old_max, odd = old_max;
    std::int32_t key = 0;
    for (; key + 2 <= keys; key += 2) {
      even = max_ignore_nan<T>(even, load(column + key * V * kLanes<T>));
      odd = max_ignore_nan<T>(odd, load(column + (key + 1) * V * kLanes<T>));
    }
    if (key < keys) even = max_ignore_nan<T>(even, load(column + key * V * kLanes<T>));
    const Vec<T> new_max = max_ignore_nan<T>(even, odd);
    // softmax_base(), lane by lane: max is never NaN, so "not above lowest" means -inf.
    const Vec<T> lowest = splat(sizeof(T) == 4 ? T(-__FLT_MAX__) : T(-__DBL_MAX__));
    const Vec<T> base = select_less(new_max, lowest, splat(T(0)), new_max);
    const Vec<T> log2_e = splat(static_cast<T>(core::kLog2E));
    rescale[v] = exp2((old_max - base) * log2_e);
    if (fault.is(InjectedFault::rescale_forgotten)) rescale[v] = splat(T(1));
    store(max + v * kLanes<T>, new_max);

    Vec<T> tile_sum = splat(T(0));
    for (key = 0; key < keys; ++key) {
      T* s = scores + (key * V + v) * kLanes<T>;
      const Vec<T> p = exp2((load(s) - base) * log2_e);
      store(s, p);
      tile_sum = tile_sum + p;
    }
    store(sum + v * kLanes<T>, load(sum + v * kLanes<T>) * rescale[v] + tile_sum);
  }
}

// ---------------------------------------------------------------------------------------------
// Storing

template <typename T>
void store_row(const Block<T>& block, std::int32_t row, const T* out_column, int panel_rows) {
  const AttentionParams& p = block.params;
  const std::int32_t i = block.query_of(row), h = block.head_of(row);
  const std::int64_t q_row = static_cast<std::int64_t>(block.sequence.q_row) + i;
  const bool to_partial = p.splits > 1;
  const auto output = [&](std::int32_t column) {
    return core::output_of_keys(out_column[column * panel_rows], block.sum[row]);
  };
  const bool adds_sink = !to_partial || p.fault.is(InjectedFault::sink_in_every_split);
  const auto final = core::finalize_row(core::SoftmaxState<T>{block.max[row], block.sum[row]},
                                        core::sink_of(p, h, adds_sink), p.fault);
  const T factor = final.factor, lse = final.lse(p.fault);
  core::assert_row_state(p, block.sequence, block.b, h, i, final.state, lse);
  for (std::int32_t c = 0; c < p.v_dim; ++c) {
    core::assert_output(p, block.sequence, block.b, h, i, output(c) * factor);
  }
  if (p.fault.is(InjectedFault::row_not_written) && i == block.sequence.q_len - 1) return;

  if (to_partial) {
    const std::int64_t at = block.split * core::partial_rows(p) +
                            core::partial_row(p, block.b, h, block.sequence.q_row, i);
    static_cast<T*>(p.partial_lse)[at] = lse;
    T* out = static_cast<T*>(p.partial_out) + at * p.v_dim;
    for (std::int32_t c = 0; c < p.v_dim; ++c) out[c] = output(c) * factor;
    return;
  }
  const std::int64_t base = core::row_offset(p.out_strides, block.b, h, q_row);
  for (std::int32_t c = 0; c < p.v_dim; ++c) {
    core::store_element(p.out, p.out_element, base + c * p.out_strides.column, output(c) * factor);
  }
  if (p.lse != nullptr) {
    static_cast<T*>(p.lse)[core::row_offset(p.lse_strides, block.b, h, q_row)] = lse;
  }
}

// ---------------------------------------------------------------------------------------------
// One work item

/// V vectors of rows at a time: kPanelVecs, or 1 where a block has few rows.
template <int V, typename T, typename Storage>
void attend(const Block<T>& block) {
  const AttentionParams& p = block.params;
  constexpr int kRows = V * kLanes<T>;
  const std::int32_t panels = (block.rows + kRows - 1) / kRows;
  load_queries<T, Storage>(block, kRows);
  for (std::int32_t r = 0; r < panels * kRows; ++r) {
    block.max[r] = core::negative_infinity<T>();
    block.sum[r] = T(0);
  }
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(panels) * kRows * p.v_dim; ++i) {
    block.out_tile[i] = T(0);
  }

  const KeyRange seen =
      core::intersect(core::keys_seen_by_any(block.sequence.mask, block.query_of(0),
                                             block.query_of(block.rows - 1)),
                      core::split_keys(block.split, p.keys_per_split, block.sequence.kv_len));
  const core::KvRowMap kv_row_map = core::kv_row_map(p, block.sequence, block.b);
  const KeyTensor k{p.k, p.k_strides, p.k_element, p.k_scale, p.head_dim};
  const KeyTensor v{p.v, p.v_strides, p.v_element, p.v_scale, p.v_dim};

  // Tiles begin at multiples of tile_k whatever the rows of this block can see; keys that none of
  // them sees are cut off at both ends, which changes no bit because their P is exactly 0.
  for (std::int32_t first_key = seen.empty() ? seen.end : core::tile_begin(seen.begin, p.tile_k);
       first_key < seen.end; first_key += p.tile_k) {
    if (core::is_set(block.cancel)) return;
    const KeyRange tile = core::intersect(seen, {first_key, first_key + p.tile_k});
    const std::int32_t keys = tile.end - tile.begin;
    load_tile<T, Storage>(block.k_tile, k, block, kv_row_map, tile);
    load_tile<T, Storage>(block.v_tile, v, block, kv_row_map, tile);
    for (std::int32_t panel = 0; panel < panels; ++panel) {
      score_panel<V>(block.scores, block.k_tile, block.q_tile + panel * kRows * p.head_dim, keys,
                     p.head_dim);
      apply_mods_and_mask<V>(block, block.scores, panel * kRows, tile);
      Vec<T> rescale[V];
      softmax_panel<V>(block.scores, keys, block.max + panel * kRows, block.sum + panel * kRows,
                       rescale, p.fault);
      value_panel<V>(block.out_tile + panel * kRows * p.v_dim, block.v_tile, block.scores, rescale,
                     keys, p.v_dim);
    }
  }
  for (std::int32_t row = 0; row < block.rows; ++row) {
    const T* out_column =
        block.out_tile + static_cast<std::int64_t>(row / kRows) * kRows * p.v_dim + row % kRows;
    store_row(block, row, out_column, kRows);
  }
}

/// Items in order: split fastest, then row block from the last (longest, if causal) to the first,
/// then KV head, then batch.
template <typename T, typename Storage>
void attention_item(const AttentionParams& params, std::int64_t item, void* scratch,
                    const std::int32_t* cancel) {
  core::spin_if_injected(params.fault, params.q_len);
  const std::int32_t split = static_cast<std::int32_t>(item % params.splits);
  item /= params.splits;
  const std::int32_t tile = params.q_tiles - 1 - static_cast<std::int32_t>(item % params.q_tiles);
  item /= params.q_tiles;
  const std::int32_t kv_head = static_cast<std::int32_t>(item % params.kv_heads);
  const std::int32_t b = static_cast<std::int32_t>(item / params.kv_heads);

  const core::SeqInfo sequence = core::seq_info_of(params, b);
  const std::int64_t group_rows = static_cast<std::int64_t>(sequence.q_len) * params.group;
  const std::int64_t first_row = static_cast<std::int64_t>(tile) * params.tile_q;
  if (first_row >= group_rows) return;
  const std::int64_t rows =
      group_rows - first_row < params.tile_q ? group_rows - first_row : params.tile_q;

  const core::ScratchLayout layout =
      core::scratch_layout(params.tile_q, params.tile_k, params.head_dim, params.v_dim);
  T* s = static_cast<T*>(scratch);
  const Block<T> block{params,
                       cancel,
                       sequence,
                       b,
                       kv_head,
                       split,
                       first_row,
                       static_cast<std::int32_t>(rows),
                       s + layout.q_tile,
                       s + layout.k_tile,
                       s + layout.v_tile,
                       s + layout.scores,
                       s + layout.out_tile,
                       s + layout.max,
                       s + layout.sum};
  if (rows <= kLanes<T>) {
    attend<1, T, Storage>(block);
  } else {
    attend<kPanelVecs, T, Storage>(block);
  }
}

// ---------------------------------------------------------------------------------------------
// Peak

/// `buffer` holds 2 vectors. Loading one each round keeps the product from being hoisted.
double multiply_add_peak(std::int64_t iterations, float* buffer) {
  constexpr int kChains = 12;  // two pipes times the latency of an FMA, and a little more
  Vec<float> acc[kChains];
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) acc[c] = splat(static_cast<float>(c));
  const Vec<float> a = splat(0.999f);
  for (std::int64_t i = 0; i < iterations; ++i) {
    const Vec<float> b = load(buffer + (i & 1) * kLanes<float>);
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) acc[c] = acc[c] + a * b;
  }
#pragma GCC unroll 16
  for (int c = 1; c < kChains; ++c) acc[0] = acc[0] + acc[c];
  store(buffer, acc[0]);
  return 2.0 * kLanes<float> * kChains * static_cast<double>(iterations);
}

inline constexpr IsaKernels kIsaKernels = {attention_item<float, float>, attention_item<float, F16>,
                                           attention_item<float, Bf16>,
                                           attention_item<double, double>, multiply_add_peak};

}  // namespace
}  // namespace flashcore::cpu
