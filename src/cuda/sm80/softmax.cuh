// The online softmax of a step.
#pragma once

#include "cuda/primitives/reduce.cuh"
#include "cuda/sm80/config.cuh"

namespace flashcore::cuda::sm80 {

/// O is rescaled only when a row maximum grows by more than this factor. P then exceeds 1, which
/// 16-bit formats can hold.
inline constexpr float kRescaleThresholdLog2 = 8.f;

/// Factor of a row's O and sum when its maximum grows from `before` to `max`.
__device__ __forceinline__ float rescale_of(float before, float max, float unit_log2, bool fused) {
  return fast_exp2(fused ? __fsub_rn(__fmul_rn(before, unit_log2), __fmul_rn(max, unit_log2))
                         : (before - max) * unit_log2);
}

/// P = 2^((S - max) unit_log2) in place of S, and its row sums. Scores and maxima are in units of
/// unit_log2. Fused: one FMA per score. It rounds max * unit_log2 first, so that the score of the
/// maximum gives exactly 0; a fused product would leave the same rounding error at every step.
/// Modified scores may be close to the largest f32, whose product with log2(e) would overflow:
/// subtract first.
template <typename C, int kKeys>
__device__ __forceinline__ void exponentiate(AccS<C, kKeys>& acc_s, RowStats<C>& row_stats,
                                             float unit_log2, bool fused) {
  constexpr int kTiles = kKeys / C::kTileWidth;
  if (!fused) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float base = core::softmax_base(row_stats.of[m][half].max);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) acc_s[m][n][C::reg_of(half, i)] -= base;
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      core::SoftmaxState<float>& state = row_stats.of[m][half];
      const float base = fused ? core::softmax_base(state.max) : 0.f;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = acc_s[m][n][C::reg_of(half, i)];
          x = fast_exp2(fmaf(x, unit_log2, -__fmul_rn(base, unit_log2)));
          sum += x;
        }
      }
      state.sum += sum;
    }
  }
}

/// True if a row keeps its maximum although `max` is larger.
__device__ __forceinline__ bool keeps_max(float max, const core::SoftmaxState<float>& state,
                                          float unit_log2) {
  return (max - state.max) * unit_log2 <= kRescaleThresholdLog2;
}

/// The maxima of the thread's own scores and of its rows' statistics. Returns true if all its rows
/// keep theirs.
template <typename C, int kKeys>
__device__ __forceinline__ bool own_maxima(float (&max)[C::kRowTiles][2],
                                           const AccS<C, kKeys>& acc_s,
                                           const RowStats<C>& row_stats, float unit_log2) {
  bool all_keep = true;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[m][half] = row_stats.of[m][half].max;
#pragma unroll
      for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
        max[m][half] = max_ignore_nan(max[m][half], acc_s[m][n][C::reg_of(half, 0)]);
        max[m][half] = max_ignore_nan(max[m][half], acc_s[m][n][C::reg_of(half, 1)]);
      }
      all_keep = all_keep && keeps_max(max[m][half], row_stats.of[m][half], unit_log2);
    }
  }
  return all_keep;
}

/// Rescales O and the sums of rows whose maximum has grown enough.
template <typename C>
__device__ __forceinline__ void rescale_rows(const float (&max)[C::kRowTiles][2], AccO<C>& acc_o,
                                             RowStats<C>& row_stats, float unit_log2, bool fused,
                                             const AttentionParams& p) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      core::SoftmaxState<float>& state = row_stats.of[m][half];
      const float row_max = row_reduce_max<C>(max[m][half]);
      const float before = state.max;
      if (!keeps_max(row_max, state, unit_log2)) state.max = row_max;
      const float rescale =
          p.fault.is(InjectedFault::rescale_forgotten)
              ? 1.f
              : rescale_of(before, core::softmax_base(state.max), unit_log2, fused);
      state.sum *= rescale;
#pragma unroll
      for (int n = 0; n < C::kColumnTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) acc_o[m][n][C::reg_of(half, i)] *= rescale;
      }
    }
  }
}

/// P = softmax(S) in place of S, unnormalized: [warp_rows, kKeys]. Updates the row statistics and
/// rescales O if a row maximum has grown enough.
template <typename C, bool kFastPath, int kKeys>
__device__ __forceinline__ void online_softmax(AccS<C, kKeys>& acc_s, AccO<C>& acc_o,
                                               RowStats<C>& row_stats, float unit_log2,
                                               const AttentionParams& p) {
  const bool fused = !has_scaled_scores<kFastPath>(p);
  float max[C::kRowTiles][2];
  const bool all_keep = own_maxima<C, kKeys>(max, acc_s, row_stats, unit_log2);
  // One branch for all rows of the warp. Most steps skip it, and with it the row reductions.
  if (!__all_sync(0xffffffffu, all_keep)) {
    rescale_rows<C>(max, acc_o, row_stats, unit_log2, fused, p);
  }
  exponentiate<C, kKeys>(acc_s, row_stats, unit_log2, fused);
}

}  // namespace flashcore::cuda::sm80
