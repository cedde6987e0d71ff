// Score modifications and the positional mask of a step.
#pragma once

#include "core/score.h"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm90/config.cuh"

namespace flashcore::cuda::sm90 {

/// A row with its own scale (fp8 block scales). Modified scores are in units of log2: their
/// exponent takes one subtraction. Constants are in f32, and the slope is in shared memory:
/// converting f64, or reading global memory, would take longer than the arithmetic. bias.cuh has
/// the bias, boolean_mask.cuh the boolean mask.
struct Log2ScoreRow : core::ScoreRow<float> {
  static constexpr float kLog2E = static_cast<float>(core::kLog2E);
  const Params& params;
  float factor;
  const float& s_slope;

  __device__ __forceinline__ float scale() const {
    return has_softcap() ? factor : factor * kLog2E;
  }
  __device__ __forceinline__ bool has_softcap() const { return params.softcap > 0.f; }
  __device__ __forceinline__ float cap() const { return params.softcap * kLog2E; }
  __device__ __forceinline__ float slope() const { return s_slope * kLog2E; }
  static constexpr bool has_bias() { return false; }
  static constexpr bool has_mask() { return false; }
};

template <typename C>
__device__ __forceinline__ float tile_slope(const WorkTile& work, const Thread<C>& t) {
  return work.alibi_slopes[C::kPackGqa ? t.first_head : 0];
}

/// True if ALiBi is the only modification, and both rows of a thread may share the terms of their
/// columns (add_alibi_columns). A batch-invariant call may not: the tiles that share them depend on
/// the other rows of the warp.
template <typename C>
__device__ __forceinline__ bool shares_alibi_columns(const Params& params) {
  return C::kSpareRegisters && params.call.alibi_slopes != nullptr && !(params.softcap > 0.f) &&
         !params.batch_invariant;
}

/// The distance that the scores of a thread's second row leave out where columns share their terms.
/// Scores of a row may be shifted; stash_row_stats corrects the maximum.
inline constexpr float kSecondRowDistance = 8.f;

/// Distance of a thread's row from its first key of the tile, in f32: exact below 2^24, one
/// rounding more beyond.
template <typename C>
__device__ __forceinline__ float first_distance(const Thread<C>& t, const WorkTile& work,
                                                std::int32_t query, std::int32_t first_key) {
  return static_cast<float>(query + work.seq.mask.diagonal - first_key - t.column(0, 0));
}

/// Scale and ALiBi of both rows, where all keys are left of the diagonal: -slope |i - j| is a term
/// of the column plus one of the row.
template <typename C>
__device__ __forceinline__ void add_alibi_columns(AccS<C>& acc_s, float factor, float slope,
                                                  float distance) {
  const float of_first = -slope * distance;
#pragma unroll
  for (int n = 0; n < C::kTileK / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float of_column = fmaf(slope, static_cast<float>(8 * n + i), of_first);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& score = acc_s[4 * n + 2 * half + i];
        score = fmaf(score, factor, of_column);
      }
    }
  }
}

/// Scale, softcap and ALiBi of a tile of S. factor(half): scale of a thread's row.
template <typename C, typename Factor>
__device__ __forceinline__ void apply_score_mods(AccS<C>& acc_s, const Thread<C>& t,
                                                 const Params& params, const WorkTile& work,
                                                 std::int32_t tile, Factor factor) {
  const std::int32_t first_key = tile * C::kTileK;
  const auto row_of = [&](int half) {
    return Log2ScoreRow{{params.call, work.b, head_of(work, t), query_of(work, t, half)},
                        params,
                        factor(half),
                        work.alibi_slopes[C::kPackGqa ? t.first_head : 0]};
  };
  const bool shared = shares_alibi_columns<C>(params);
  if (shared) {
    const float distance = first_distance(t, work, query_of(work, t, 0), first_key);
    if (__all_sync(0xffffffffu, distance >= static_cast<float>(C::kTileK))) {
      const Log2ScoreRow row = row_of(0);
      return add_alibi_columns<C>(acc_s, row.scale(), row.slope(), distance);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Log2ScoreRow row = row_of(half);
    const float distance = first_distance(t, work, query_of(work, t, half), first_key);
    const auto each = [&](auto change) {
#pragma unroll
      for (int n = 0; n < C::kTileK / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          change(acc_s[4 * n + 2 * half + i], first_key + t.column(0, 0) + 8 * n + i,
                 distance - static_cast<float>(8 * n + i));
        }
      }
    };
    core::modify_scores<FastMath, core::ScoreInput::qk>(row, each);
    if (shared && half == 1) {
      const float shift = kSecondRowDistance * row.slope();
      each([&](float& score, std::int32_t, float) { score += shift; });
    }
  }
}

/// Hides the keys that a thread's rows do not see by their position.
template <typename C>
__device__ __forceinline__ void apply_mask(AccS<C>& acc_s, const Thread<C>& t, const WorkTile& work,
                                           std::int32_t tile) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto hide = [&](auto hidden) {
#pragma unroll
      for (int n = 0; n < C::kTileK / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (hidden(8 * n + i)) acc_s[4 * n + 2 * half + i] = core::negative_infinity<float>();
        }
      }
    };
    // Relative to the tile, so that columns are compared with constants.
    const std::int32_t origin = tile * C::kTileK + t.column(0, 0);
    const std::int32_t query = query_in_tile(t, half);
    const std::int32_t end = min(work.edges.end + query, work.edges.last) - origin;
    hide([&](int column) { return column >= end; });
    if (tile < work.unmasked_tiles[t.group].begin) {
      const std::int32_t begin = work.edges.begin + query - origin;
      hide([&](int column) { return column < begin; });
    }
  }
}

}  // namespace flashcore::cuda::sm90
