// P and dZ of a step, from S and dP: options, masks by position, the derivative of the softcap.
#pragma once

#include "core/score.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm90/bwd_config.cuh"

namespace flashcore::cuda::sm90 {

/// The rows of B that a thread's two rows of A see, relative to its first column of the step.
struct BwdVisible {
  std::int32_t begin[2], end[2];

  __device__ __forceinline__ bool operator()(int half, int column) const {
    return column >= begin[half] && column < end[half];
  }
};

template <typename C, typename Steps>
__device__ __forceinline__ BwdVisible visible_rows(const BwdWorkTile& work, const Thread<C>& t,
                                                   std::int32_t tile) {
  BwdVisible visible;
  const std::int32_t origin = tile * Steps::kRows + t.column(0, 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int32_t row = t.row(half);
    visible.begin[half] = work.edges.begin + row - origin;
    visible.end[half] = min(work.edges.end + row, work.edges.last) - origin;
    // dZ of keys past the last one would reach dQ.
    if (C::kFused && row >= work.rows) visible.end[half] = visible.begin[half];
  }
  return visible;
}

/// visit(i, half, column) for the accumulators of a step of kRows rows of B: element i is in row
/// `half` of the thread's rows of A and in `column` of the step, relative to the thread's first.
template <int kRows, typename Visit>
__device__ __forceinline__ void for_pairs(Visit visit) {
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
    for (int r = 0; r < 4; ++r) visit(4 * n + r, r / 2, 8 * n + r % 2);
  }
}

/// Replaces the pairs of a step that are not visible.
template <int kRows>
__device__ __forceinline__ void hide_pairs(float (&acc)[kRows / 2], const BwdVisible& visible,
                                           float replacement) {
  for_pairs<kRows>([&](int i, int half, int column) {
    if (!visible(half, column)) acc[i] = replacement;
  });
}

/// A score in units of log2, and its derivative with respect to scale Q K^T.
struct BwdScore {
  float value, slope;
};

struct BwdPair {
  float p, dz;
};

/// The score of a call with ALiBi or a softcap.
template <bool kCapped>
struct OptionScore {
  float unit;      // of Q K^T: gives the argument of core::capped(), or units of log2
  float cap_log2;  // cap times log2(e)
  float alibi_slope_log2;

  __device__ __forceinline__ BwdScore operator()(float qk, float distance) const {
    BwdScore score{qk * unit, 1.f};
    if constexpr (kCapped) {
      const float tanh = 1.f - __fdividef(2.f, 1.f + fast_exp2(score.value));
      score = {cap_log2 * tanh, fmaf(-tanh, tanh, 1.f)};
    }
    score.value -= alibi_slope_log2 * fabsf(distance);
    return score;
  }
};

/// dS of a pair from P, dP and delta, times core::ds_unit() in f16 kernels.
/// There, delta is scaled already.
template <typename C>
__device__ __forceinline__ float score_gradient(float p, float dp, float delta, float ds_scale) {
  if constexpr (C::kScalesDs) return p * fmaf(dp, ds_scale, -delta);
  return p * (dp - delta);
}

}  // namespace flashcore::cuda::sm90
