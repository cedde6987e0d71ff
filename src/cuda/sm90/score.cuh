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
__device__ __forceinline__ float slope_of(const WorkTile& work, const Thread<C>& t) {
  return work.alibi_slopes[C::kPackGqa ? t.first_head : 0];
}

/// Distance of a thread's row from its first key of the tile, in f32: exact below 2^24, one
/// rounding more beyond.
template <typename C>
__device__ __forceinline__ float first_distance(const Thread<C>& t, const WorkTile& work,
                                                std::int32_t query, std::int32_t first_key) {
  return static_cast<float>(query + work.seq.mask.diagonal - first_key - t.column(0, 0));
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
