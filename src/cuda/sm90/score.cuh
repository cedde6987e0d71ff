// Score modifications and the positional mask of a step.
#pragma once

#include "core/score.h"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm90/config.cuh"

namespace flashcore::cuda::sm90 {

/// A row with its own scale (fp8 block scales). Constants are in f32, and the slope is in shared
/// memory: converting f64, or reading global memory, would take longer than the arithmetic. The
/// planner sends calls with a bias to other families; boolean_mask.cuh has the boolean mask.
struct ScaledScoreRow : core::ScoreRow<float> {
  const Params& params;
  float factor;
  const float& s_slope;

  __device__ __forceinline__ float scale() const { return factor; }
  __device__ __forceinline__ bool has_softcap() const { return params.softcap > 0.f; }
  __device__ __forceinline__ float cap() const { return params.softcap; }
  __device__ __forceinline__ float slope() const { return s_slope; }
  static constexpr bool has_bias() { return false; }
  static constexpr bool has_mask() { return false; }
};

/// Scale, softcap and ALiBi of one row of S.
template <typename C>
__device__ __forceinline__ void apply_score_mods(AccS<C>& acc_s, int half, const Thread<C>& t,
                                                 const Params& params, const WorkTile& work,
                                                 std::int32_t query, std::int32_t first_key,
                                                 float factor) {
  const ScaledScoreRow row{{params.call, work.b, head_of(work, t), query},
                           params,
                           factor,
                           work.alibi_slopes[C::kPackGqa ? t.first_head : 0]};
  // Distances count from the thread's first key, in f32: exact below 2^24, one rounding more
  // beyond.
  const auto first_distance =
      static_cast<float>(query + work.seq.mask.diagonal - first_key - t.column(0, 0));
  const auto each = [&](auto change) {
#pragma unroll
    for (int n = 0; n < C::kTileK / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        change(acc_s[4 * n + 2 * half + i], first_key + t.column(0, 0) + 8 * n + i,
               first_distance - static_cast<float>(8 * n + i));
      }
    }
  };
  using core::ScoreInput;
  // Keys left of the diagonal, without other modifications: two FFMAs for scale and ALiBi.
  const bool only_alibi = row.has_alibi() && !row.has_softcap();
  if (C::kSpareRegisters && only_alibi &&
      __all_sync(0xffffffffu, first_distance >= static_cast<float>(C::kTileK))) {
    const float slope = row.slope(), of_first = -slope * first_distance;
#pragma unroll
    for (int n = 0; n < C::kTileK / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = acc_s[4 * n + 2 * half + i];
        score = fmaf(slope, static_cast<float>(8 * n + i), fmaf(score, factor, of_first));
      }
    }
    return;
  }
  if constexpr (!C::kSpareRegisters) {
    core::modify_scores<FastMath, ScoreInput::qk>(row, each);
  } else if (params.batch_invariant) {
    core::modify_scores<FastMath, ScoreInput::qk>(row, each);
  } else {
    core::modify_scores<PolynomialCapMath, ScoreInput::qk>(row, each);
  }
}

/// Applies score modifications and the mask to a tile of S. The fast path leaves the scale to the
/// softmax. needs_mask: some row does not see all keys. factor(half): scale of a thread's row.
template <typename C, bool kFastPath, typename Factor>
__device__ __forceinline__ void apply_mods_and_mask(AccS<C>& acc_s, const Thread<C>& t,
                                                    const Params& params, const WorkTile& work,
                                                    std::int32_t tile, bool needs_mask,
                                                    Factor factor) {
  if (kFastPath && !needs_mask) return;
  const std::int32_t first_key = tile * C::kTileK;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (!kFastPath) {
      apply_score_mods<C>(acc_s, half, t, params, work, query_of(work, t, half), first_key,
                          factor(half));
    }
    if (!needs_mask) continue;
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
    const std::int32_t origin = first_key + t.column(0, 0);
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
