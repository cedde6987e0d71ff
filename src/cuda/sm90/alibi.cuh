// ALiBi left of the diagonal. There -slope |i - j| is a term of the column plus one of the row, and
// in units of the slope the term of the column is its number: a constant of the instruction.
#pragma once

#include "cuda/sm90/score.cuh"
#include "cuda/sm90/softmax.cuh"

namespace flashcore::cuda::sm90 {

/// Exponents of scores x in units of the slope: slope x + offset, in units of log2. Row maxima are
/// in units of log2. It costs one instruction more than no ALiBi, to_slope_units().
struct AlibiExponent {
  float slope, offset;

  __device__ __forceinline__ float of(float max) const { return max; }
  __device__ __forceinline__ float minus(float score, float base) const {
    return fmaf(score, slope, offset - base);
  }
  __device__ __forceinline__ float difference(float x, float y) const { return __fsub_rn(x, y); }
};

/// A step with ALiBi as its only modification.
struct AlibiStep {
  bool shares_columns;  // all lanes may use the exponent
  AlibiExponent exponent;
};

/// All keys must be left of the diagonal. Slopes far from 1, and those that are not positive, could
/// leave the range of f32.
template <typename C>
__device__ __forceinline__ AlibiStep alibi_step(const Params& params, const WorkTile& work,
                                                const Thread<C>& t, std::int32_t tile) {
  const float slope = tile_slope(work, t) * static_cast<float>(core::kLog2E);
  const float distance = first_distance(t, work, query_of(work, t, 0), tile * C::kTileK);
  const bool shares = distance >= static_cast<float>(C::kTileK) && slope > 0x1p-20f &&
                      slope < 0x1p+20f && fabsf(params.score_scale) < 0x1p+20f;
  return {__all_sync(0xffffffffu, shares) != 0, {slope, -slope * distance}};
}

/// Raw scores to units of the slope, relative to the lane's first column.
template <typename C>
__device__ __forceinline__ void to_slope_units(AccS<C>& acc_s, float score_scale, float slope) {
  const float approximate = __fdividef(1.f, slope);
  const float inverse = fmaf(fmaf(-slope, approximate, 1.f), approximate, approximate);
  const float factor = score_scale * static_cast<float>(core::kLog2E) * inverse;
#pragma unroll
  for (int n = 0; n < C::kTileK / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = acc_s[4 * n + i];
      score = fmaf(score, factor, static_cast<float>(8 * n + i % 2));
    }
  }
}

/// The online softmax of scores in units of the slope.
template <typename C>
__device__ __forceinline__ void alibi_softmax(AccS<C>& acc_s, RowStats& row_stats,
                                              float (&rescale)[2], const AlibiExponent& exponent,
                                              core::Fault fault) {
  float max[2];
  lane_row_max<C, 0, 2>(max, acc_s, init_row_stats());
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float of_lane = fmaf(max[half], exponent.slope, exponent.offset);
    max[half] = max_ignore_nan(row_stats.of[half].max, quad_max(of_lane));
  }
  exponentials<C, 0, 2>(acc_s, row_stats, rescale, max, exponent, fault);
}

}  // namespace flashcore::cuda::sm90
