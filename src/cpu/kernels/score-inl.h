// Scores of the CPU kernel: modifications (core/score.h), masks and online softmax.
#pragma once

#include "core/mask.h"
#include "core/score.h"
#include "core/softmax.h"
#include "cpu/kernels/load-inl.h"
#include "cpu/kernels/simd.h"

namespace flashcore::cpu {
namespace {

/// Softcap and absolute value of vectors.
template <typename T>
struct VecScoreMath {
  FLASHCORE_HD static Vec<T> absolute(Vec<T> x) { return cpu::absolute(x); }

  template <typename Each>
  static void softcap(T cap, Each each) {
    each([&](Vec<T> argument) { return capped(argument, cap); });
  }

  static Vec<T> capped(Vec<T> argument, T cap) {
    if (cap > T(core::kLargestShortCap)) {
      T lane[kLanes<T>];
      store(lane, argument);
      for (T& x : lane) x = core::capped(x, cap);
      return load(lane);
    }
    const Vec<T> one = splat(T(1)), two = splat(T(2)), zero = splat(T(0));
    const Vec<T> limit = splat(T(100));  // exp2() accepts up to 100; tanh rounds to ±1 far below
    Vec<T> x = select_less(limit, argument, limit, argument);
    x = select_less(x, zero - limit, zero - limit, x);
    return splat(cap) * (one - two / (one + exp2<T>(x)));
  }
};

/// core::ScoreRow of a vector of rows: first_row and following of the work tile. Lanes past its end
/// repeat the last row.
template <typename T>
struct ScoreRowVec {
  const WorkTile<T>& work;
  std::int32_t first_row;

  core::ScoreRow<T> lane(int i) const {
    const std::int32_t row = first_row + i < work.rows ? first_row + i : work.rows - 1;
    return {work.params, work.b, work.head_of(row), work.query_of(row)};
  }
  bool has_softcap() const { return lane(0).has_softcap(); }
  bool has_alibi() const { return lane(0).has_alibi(); }
  bool has_bias() const { return lane(0).has_bias(); }
  bool has_mask() const { return lane(0).has_mask(); }
  core::Fault fault() const { return work.params.fault; }
  T cap() const { return lane(0).cap(); }
  Vec<T> slope() const {
    T slopes[kLanes<T>];
    for (int i = 0; i < kLanes<T>; ++i) slopes[i] = lane(i).slope();
    return load(slopes);
  }

  template <typename Use>
  void with_bias(Use use) const {
    std::int64_t offset[kLanes<T>];
    for (int i = 0; i < kLanes<T>; ++i) offset[i] = lane(i).bias_offset();
    const AttentionParams& p = work.params;
    const auto use_format = [&]<core::Element kElement>() {
      use([&](Vec<T> score, std::int32_t key) {
        T bias[kLanes<T>];
        for (int i = 0; i < kLanes<T>; ++i) {
          bias[i] =
              core::load_element<T>(p.bias, kElement, offset[i] + key * p.bias_strides.column);
        }
        return score + load(bias);
      });
    };
    switch (p.bias_element) {
      case core::Element::f64: return use_format.template operator()<core::Element::f64>();
      case core::Element::f32: return use_format.template operator()<core::Element::f32>();
      case core::Element::f16: return use_format.template operator()<core::Element::f16>();
      default: return use_format.template operator()<core::Element::bf16>();
    }
  }
  template <typename Use>
  void with_mask(Use use) const {
    if (work.params.block_mask.given()) return with_block_mask(use);
    const std::uint8_t* rows[kLanes<T>];
    for (int i = 0; i < kLanes<T>; ++i) rows[i] = work.params.mask + lane(i).mask_offset();
    use([&](Vec<T> score, std::int32_t key) {
      T visible[kLanes<T>];
      for (int i = 0; i < kLanes<T>; ++i) {
        visible[i] = static_cast<T>(rows[i][key * work.params.mask_strides.column]);
      }
      return select_less(splat(T(0)), load(visible), score, splat(core::negative_infinity<T>()));
    });
  }
  template <typename Use>
  void with_block_mask(Use use) const {
    const core::BlockMask& mask = work.params.block_mask;
    const std::int32_t* rows[kLanes<T>];
    std::int32_t queries[kLanes<T>];
    for (int i = 0; i < kLanes<T>; ++i) {
      rows[i] = lane(i).block_mask_row();
      queries[i] = lane(i).query;
    }
    use([&](Vec<T> score, std::int32_t key) {
      T visible[kLanes<T>];
      for (int i = 0; i < kLanes<T>; ++i) {
        visible[i] = mask.shows(rows[i], queries[i], key) ? T(1) : T(0);
      }
      return select_less(splat(T(0)), load(visible), score, splat(core::negative_infinity<T>()));
    });
  }
};

/// True if a block mask hides the keys of `tile` from all rows of the work tile. The tile then adds
/// exactly 0 to every row and may be skipped.
template <typename T>
bool is_hidden_tile(const WorkTile<T>& work, KeyRange tile) {
  const AttentionParams& p = work.params;
  if (!p.block_mask.given() || p.fault.is(InjectedFault::mask_batch_ignored)) return false;
  const std::int32_t heads = p.block_mask.strides.head == 0 ? 1 : p.group;
  for (std::int32_t g = 0; g < heads; ++g) {
    if (!p.block_mask.hides(work.b, work.kv_head * p.group + g, work.query_of(0),
                            work.query_of(work.rows - 1), tile.begin, tile.end)) {
      return false;
    }
  }
  return true;
}

/// Modifies the scores of one vector of rows, from first_row on: scores[key * stride].
template <typename T>
void modify_vector(const WorkTile<T>& work, T* scores, std::int32_t stride, std::int32_t first_row,
                   KeyRange tile) {
  const ScoreRowVec<T> row{work, first_row};
  T distances[kLanes<T>];  // to the tile's first key
  for (int lane = 0; lane < kLanes<T>; ++lane) {
    distances[lane] =
        static_cast<T>(work.query_of(first_row + lane) + work.sequence.mask.diagonal - tile.begin);
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

/// Sets the scores outside each row's interval of visible keys to -inf.
template <int V, typename T>
void apply_key_ranges(const WorkTile<T>& work, T* scores, std::int32_t panel_row, KeyRange tile) {
  constexpr int kRows = V * kLanes<T>;
  T begin[kRows], end[kRows];  // relative to the tile, so that T holds them exactly
  const std::int32_t keys = tile.end - tile.begin;
  for (int r = 0; r < kRows; ++r) {
    begin[r] = T(0), end[r] = static_cast<T>(keys);
    if (panel_row + r >= work.rows) continue;
    const KeyRange visible = core::visible_keys(work.sequence.mask, work.query_of(panel_row + r));
    const KeyRange here = core::intersect(visible, tile);
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

/// `fully_visible` are the keys that all rows of the panel see.
template <int V, typename T>
void apply_mods_and_mask(const WorkTile<T>& work, T* scores, std::int32_t panel_row, KeyRange tile,
                         KeyRange fully_visible) {
  if (!work.params.fast_path) {
    for (int v = 0; v < V; ++v) {
      modify_vector(work, scores + v * kLanes<T>, V * kLanes<T>, panel_row + v * kLanes<T>, tile);
    }
  }
  if (tile.begin < fully_visible.begin || tile.end > fully_visible.end) {
    apply_key_ranges<V>(work, scores, panel_row, tile);
  }
}

template <int V, typename T>
void apply_mods_and_mask(const WorkTile<T>& work, T* scores, std::int32_t panel_row,
                         KeyRange tile) {
  const std::int32_t last_row =
      (panel_row + V * kLanes<T> < work.rows ? panel_row + V * kLanes<T> : work.rows) - 1;
  apply_mods_and_mask<V>(work, scores, panel_row, tile,
                         core::keys_seen_by_all(work.sequence.mask, work.query_of(panel_row),
                                                work.query_of(last_row)));
}

/// Multiplies a panel's scores by `scale` > 0 if score options follow. Returns the factor that the
/// scores still lack.
template <int V, typename T>
T apply_score_scale(const WorkTile<T>& work, T* scores, std::int32_t keys, T scale) {
  if (work.params.fast_path) return scale;
  for (std::int32_t i = 0; i < keys * V; ++i) {
    store(scores + i * kLanes<T>, load(scores + i * kLanes<T>) * splat(scale));
  }
  return T(1);
}

/// Online softmax of a panel between its scores and its P.
template <int V, typename T>
struct PanelSoftmax {
  Vec<T> base[V];     // subtracted from scores: core::softmax_base() of the new maximum
  Vec<T> rescale[V];  // factor of the output and sum so far
};

/// Updates the row maxima by the scores of a KV tile.
template <int V, typename T>
PanelSoftmax<V, T> update_max(const T* scores, std::int32_t keys, T* max, core::Fault fault) {
  PanelSoftmax<V, T> softmax;
  for (int v = 0; v < V; ++v) {
    const T* column = scores + v * kLanes<T>;
    const Vec<T> old_max = load(max + v * kLanes<T>);
    // Two chains hide the latency of compare-and-select. A maximum does not depend on the order.
    Vec<T> even = splat(core::negative_infinity<T>()), odd = even;
    std::int32_t key = 0;
    for (; key + 2 <= keys; key += 2) {
      even = max_ignore_nan<T>(even, load(column + key * V * kLanes<T>));
      odd = max_ignore_nan<T>(odd, load(column + (key + 1) * V * kLanes<T>));
    }
    if (key < keys) even = max_ignore_nan<T>(even, load(column + key * V * kLanes<T>));
    const Vec<T> new_max = max_ignore_nan<T>(old_max, max_ignore_nan<T>(even, odd));
    // softmax_base() for every lane. max is never NaN, so below `lowest` there is only -inf.
    const Vec<T> lowest = splat(sizeof(T) == 4 ? T(-__FLT_MAX__) : T(-__DBL_MAX__));
    softmax.base[v] = select_less(new_max, lowest, splat(T(0)), new_max);
    softmax.rescale[v] = exp<T>(old_max - softmax.base[v]);
    if (fault.is(InjectedFault::rescale_forgotten)) softmax.rescale[v] = splat(T(1));
    store(max + v * kLanes<T>, new_max);
  }
  return softmax;
}

/// Adds the sum of a tile's P, one vector of rows, to the running sum.
template <typename T>
FLASHCORE_HD void add_to_sum(T* sum, Vec<T> rescale, Vec<T> tile_sum) {
  store(sum, load(sum) * rescale + tile_sum);
}

}  // namespace
}  // namespace flashcore::cpu
