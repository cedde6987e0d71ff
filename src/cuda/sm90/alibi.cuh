// ALiBi on one side of the diagonal. There -slope |i - j| is a term of the key plus one of the row.
// In units of the slope the term of the key is its number, a constant of the instruction, and the
// exponent adds the term of the row: one instruction a score more than no ALiBi. Tiles on the
// diagonal take apply_score_mods.
#pragma once

#include "cuda/sm90/score.cuh"
#include "cuda/sm90/softmax.cuh"

namespace flashcore::cuda::sm90 {

/// The side of the diagonal on which all keys of a tile lie, for all rows of the warp.
enum class AlibiSide { both, left, right };

/// Exponents of scores in units of the slope, relative to the lane's first key. Row maxima are in
/// units of log2.
struct AlibiExponent {
  float slope, row_term[2];

  __device__ __forceinline__ float of(float max) const { return max; }
  __device__ __forceinline__ float minus(float score, float base) const {
    return fmaf(score, slope, -base);
  }
  __device__ __forceinline__ float difference(float x, float y) const { return __fsub_rn(x, y); }
};

/// A step with ALiBi as its only modification.
struct AlibiStep {
  AlibiSide side;
  AlibiExponent exponent;
};

/// Slopes far from 1, and those that are not positive, could leave the range of f32: for them the
/// tile counts as one on the diagonal.
template <typename C>
__device__ __forceinline__ AlibiStep alibi_step(const Params& params, const WorkTile& work,
                                                const Thread<C>& t, std::int32_t tile) {
  constexpr float kSmallest = 0x1p-20f, kLargest = 0x1p+20f;
  const float slope = slope_of(work, t) * static_cast<float>(core::kLog2E);
  const bool in_range =
      slope > kSmallest && slope < kLargest && fabsf(params.score_scale) < kLargest;
  const std::int32_t first_key = tile * C::kTileK;
  float distance[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    distance[half] = first_distance(t, work, query_of(work, t, half), first_key);
  }
  const bool left = distance[0] >= static_cast<float>(C::kTileK), right = distance[1] <= 0.f;
  const AlibiSide side = __all_sync(0xffffffffu, in_range && left)    ? AlibiSide::left
                         : __all_sync(0xffffffffu, in_range && right) ? AlibiSide::right
                                                                      : AlibiSide::both;
  const float row_slope = side == AlibiSide::left ? -slope : slope;
  return {side, {slope, {row_slope * distance[0], row_slope * distance[1]}}};
}

/// Raw scores to units of the slope, with the terms of the keys.
template <typename C>
__device__ __forceinline__ void to_slope_units(AccS<C>& acc_s, float score_scale,
                                               const AlibiStep& step) {
  const float slope = step.exponent.slope;
  const float approximate = __fdividef(1.f, slope);
  const float inverse = fmaf(fmaf(-slope, approximate, 1.f), approximate, approximate);
  const float factor = score_scale * static_cast<float>(core::kLog2E) * inverse;
  const auto add = [&](auto sign) {
#pragma unroll
    for (int n = 0; n < C::kTileK / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = acc_s[4 * n + i];
        score = fmaf(score, factor, static_cast<float>(sign() * (8 * n + i % 2)));
      }
    }
  };
  if (step.side == AlibiSide::left) {
    add(std::integral_constant<int, 1>{});
  } else {
    add(std::integral_constant<int, -1>{});
  }
}

template <typename C, int kFirst, int kRows>
__device__ __forceinline__ void alibi_softmax_rows(AccS<C>& acc_s, RowStats& row_stats,
                                                   float (&rescale)[2],
                                                   const AlibiExponent& exponent,
                                                   core::Fault fault) {
  float max[2];  // in a lane: the lanes of a quad count from different keys
  lane_row_max<C, kFirst, kRows>(max, acc_s, init_row_stats());
#pragma unroll
  for (int half = kFirst; half < kFirst + kRows; ++half) {
    const float of_lane = fmaf(max[half], exponent.slope, exponent.row_term[half]);
    max[half] = max_ignore_nan(row_stats.of[half].max, quad_max(of_lane));
  }
  exponentials<C, kFirst, kRows>(acc_s, row_stats, rescale, max, exponent, fault);
}

/// The online softmax of scores in units of the slope.
template <typename C>
__device__ __forceinline__ void alibi_softmax(AccS<C>& acc_s, RowStats& row_stats,
                                              float (&rescale)[2], const AlibiExponent& exponent,
                                              core::Fault fault) {
  if constexpr (C::kSchedule.split_rows) {
    alibi_softmax_rows<C, 0, 1>(acc_s, row_stats, rescale, exponent, fault);
    alibi_softmax_rows<C, 1, 1>(acc_s, row_stats, rescale, exponent, fault);
  } else {
    alibi_softmax_rows<C, 0, 2>(acc_s, row_stats, rescale, exponent, fault);
  }
}

}  // namespace flashcore::cuda::sm90
