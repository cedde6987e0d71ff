// Score modifications (scale, softcap, ALiBi, bias) and masks of a step.
#pragma once

#include "core/score.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm80/config.cuh"

namespace flashcore::cuda::sm80 {

/// A row of the tile. Bias and mask of keys outside `range` are not read, because they may lie past
/// the end of the tensors.
template <typename C>
struct TileScoreRow : core::ScoreRow<float> {
  KeyRange range;

  template <typename Use>
  __device__ __forceinline__ void with_bias(Use use) const {
    const auto read_as = [&](auto zero) {
      const auto* g_row = static_cast<const decltype(zero)*>(p.bias) + bias_offset();
      const std::int64_t stride = p.bias_strides.column;
      use([&](float score, std::int32_t key) {
        if (range.contains(key)) score += to_float(g_row[key * stride]);
        return score;
      });
    };
    if (p.bias_element == core::Element::f32) {
      read_as(0.f);
    } else {
      with_element<C>(p.bias_element, read_as);
    }
  }
  template <typename Use>
  __device__ __forceinline__ void with_mask(Use use) const {
    core::ScoreRow<float>::with_mask([&](auto masked) {
      use([&](float score, std::int32_t key) {
        return range.contains(key) ? masked(score, key) : score;
      });
    });
  }
};

/// Scale, softcap, ALiBi, bias and boolean mask of one row of S (registers reg_of(half, …) of every
/// accumulator tile).
template <typename C, int kKeys>
__device__ __forceinline__ void apply_score_mods(float (&acc_s)[kKeys / C::kTileWidth][4], int half,
                                                 const Thread<C>& t, const AttentionParams& p,
                                                 const WorkTile& work, const Row& row,
                                                 KeyRange range, std::int32_t first_key) {
  // scale_scores() has scaled the scores of 8-bit K.
  constexpr auto kInput = C::kKv8 ? core::ScoreInput::scaled : core::ScoreInput::qk;
  const TileScoreRow<C> score_row{{p, work.b, row.head, row.query}, range};
  const std::int64_t position = row.query + work.seq.mask.diagonal;
  core::modify_scores<FastMath, kInput>(score_row, [&](auto change) {
#pragma unroll
    for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int reg = C::reg_of(half, i);
        const std::int32_t key = first_key + t.column(n, reg);
        change(acc_s[n][reg], key, static_cast<float>(position - key));
      }
    }
  });
}

/// Applies score modifications and masks to S. The fast path leaves the scale to the softmax.
template <typename C, bool kFastPath, int kKeys>
__device__ __forceinline__ void apply_mods_and_mask(AccS<C, kKeys>& acc_s, const Thread<C>& t,
                                                    const AttentionParams& p, const WorkTile& work,
                                                    const WarpKeys& keys, std::int32_t first_key) {
  const bool all_visible =
      first_key >= keys.fully_visible.begin && first_key + kKeys <= keys.fully_visible.end;
  if (kFastPath && all_visible) return;  // warp-uniform
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = t.row(m, half);
      const Row row = row_of(p, work, r);
      // Rows past the end see no key, so nothing is read for them.
      const KeyRange range =
          r < work.rows
              ? core::intersect(core::visible_keys(work.seq.mask, row.query), keys.visible)
              : KeyRange{0, 0};
      if constexpr (!kFastPath) {
        apply_score_mods<C, kKeys>(acc_s[m], half, t, p, work, row, range, first_key);
      }
#pragma unroll
      for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int reg = C::reg_of(half, i);
          if (!range.contains(first_key + t.column(n, reg))) {
            acc_s[m][n][reg] = core::negative_infinity<float>();
          }
        }
      }
    }
  }
}

}  // namespace flashcore::cuda::sm80
