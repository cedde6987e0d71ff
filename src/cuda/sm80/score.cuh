// Score modifications (scale, softcap, ALiBi, bias) and masks of a step.
#pragma once

#include "core/score.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm80/boolean_mask.cuh"

namespace flashcore::cuda::sm80 {

/// A row of the tile. Constants are in f32 and the slope is in shared memory: converting f64, or
/// reading global memory, would take longer than the arithmetic.
struct TileScoreRow : core::ScoreRow<float> {
  const WorkTile& work;
  const float& s_slope;

  __device__ __forceinline__ float scale() const { return work.score_scale; }
  __device__ __forceinline__ float cap() const { return work.softcap; }
  __device__ __forceinline__ float slope() const { return s_slope; }
  __device__ __forceinline__ bool has_softcap() const { return work.softcap >= 0.f; }
  static constexpr bool has_bias() { return false; }  // add_bias()
  static constexpr bool has_mask() { return false; }  // boolean_mask.cuh
};

/// Adds the bias to the thread's first row of S. Keys past the visible ones are not read, because
/// they may lie past the end of the tensor.
template <typename C, int kKeys, typename T>
__device__ __forceinline__ void add_row_bias(AccS<C, kKeys>& acc_s, const T* g_row,
                                             std::int64_t stride, std::int32_t end,
                                             const Thread<C>& t, std::int32_t first_key) {
  struct alignas(2 * sizeof(T)) Pair {
    T x[2];
  };
  const std::int32_t key = first_key + t.column(0, C::reg_of(0, 0));
  const T* g_first = g_row + key * stride;
  const bool pairs = !C::kSwapAB && stride == 1 && first_key + kKeys <= end &&
                     reinterpret_cast<std::uintptr_t>(g_first) % sizeof(Pair) == 0;
  const std::int32_t left = end - key;
  if (pairs) {
#pragma unroll
    for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
      const Pair pair = *reinterpret_cast<const Pair*>(g_first + C::kTileWidth * n);
      acc_s[0][n][C::reg_of(0, 0)] += to_float(pair.x[0]);
      acc_s[0][n][C::reg_of(0, 1)] += to_float(pair.x[1]);
    }
    return;
  }
#pragma unroll
  for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int more = C::kTileWidth * n + C::column_step(i);
      if (more < left) acc_s[0][n][C::reg_of(0, i)] += to_float(g_first[more * stride]);
    }
  }
}

/// Moves the rows of S one down, and the first one to the end.
template <typename C, int kKeys>
__device__ __forceinline__ void rotate_rows(AccS<C, kKeys>& acc_s) {
#pragma unroll
  for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int low = C::reg_of(0, i), high = C::reg_of(1, i);
      const float first = acc_s[0][n][low];
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        acc_s[m][n][low] = acc_s[m][n][high];
        acc_s[m][n][high] = m + 1 < C::kRowTiles ? acc_s[m + 1][n][low] : first;
      }
    }
  }
}

/// Adds the bias to S. The loop over the rows is rolled: code for each, of four kinds of loads, was
/// a fifth of the kernel.
template <typename C, int kKeys>
__device__ __forceinline__ void add_bias(AccS<C, kKeys>& acc_s, const Thread<C>& t,
                                         const SharedStorage<C>& s, const AttentionParams& p,
                                         std::int32_t first_key) {
#pragma unroll 1
  for (int i = 0; i < 2 * C::kRowTiles; ++i) {
    const Row row = row_of(p, s.work, min(t.row(i / 2, i % 2), s.work.rows - 1));
    const core::ScoreRow<float> score_row{p, s.work.b, row.head, row.query};
    const auto add_as = [&](auto zero) {
      add_row_bias<C, kKeys>(acc_s,
                             static_cast<const decltype(zero)*>(p.bias) + score_row.bias_offset(),
                             p.bias_strides.column, s.work.visible.end, t, first_key);
    };
    if (p.bias_element == core::Element::f32) {
      add_as(0.f);
    } else {
      with_element<C>(p.bias_element, add_as);
    }
    rotate_rows<C, kKeys>(acc_s);
  }
}

/// Scale, softcap and ALiBi of one row of S (registers reg_of(half, …) of every accumulator tile).
template <typename C, int kKeys>
__device__ __forceinline__ void apply_score_mods(float (&acc_s)[kKeys / C::kTileWidth][4], int half,
                                                 int r, const Thread<C>& t,
                                                 const SharedStorage<C>& s,
                                                 const AttentionParams& p, std::int32_t first_key) {
  // scale_scores() has scaled the scores of 8-bit K.
  constexpr auto kInput = C::kKv8 ? core::ScoreInput::scaled : core::ScoreInput::qk;
  const Row row = row_of(p, s.work, min(r, s.work.rows - 1));
  const TileScoreRow score_row{{p, s.work.b, row.head, row.query}, s.work, s.slopes[r]};
  // Distances count from the thread's first key, in f32: exact below 2^24, one rounding more
  // beyond.
  const std::int32_t column = t.column(0, C::reg_of(half, 0));
  const auto distance =
      static_cast<float>(row.query + s.work.seq.mask.diagonal - first_key - column);
  core::modify_scores<FastMath, kInput>(score_row, [&](auto change) {
#pragma unroll
    for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int more = C::kTileWidth * n + C::column_step(i);
        change(acc_s[n][C::reg_of(half, i)], first_key + column + more,
               distance - static_cast<float>(more));
      }
    }
  });
}

/// Hides the keys outside of each row's interval (core/mask.h).
template <typename C, int kKeys>
__device__ __forceinline__ void hide_keys_by_position(AccS<C, kKeys>& acc_s, const Thread<C>& t,
                                                      const AttentionParams& p,
                                                      const WorkTile& work, const WarpKeys& keys,
                                                      std::int32_t first_key) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = t.row(m, half);
      const Row row = row_of(p, work, r);
      // Rows past the end see no key.
      const KeyRange range =
          r < work.rows
              ? core::intersect(core::visible_keys(work.seq.mask, row.query), keys.visible)
              : KeyRange{0, 0};
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

/// Applies score modifications and masks to S. If no modification needs scaled scores, the scale is
/// left to the softmax. `bits` are read if the call has a boolean mask.
template <typename C, bool kFastPath, int kKeys>
__device__ __forceinline__ void apply_mods_and_mask(AccS<C, kKeys>& acc_s, const Thread<C>& t,
                                                    const SharedStorage<C>& s,
                                                    const AttentionParams& p, const WarpKeys& keys,
                                                    const MaskBits<C>& bits,
                                                    std::int32_t first_key) {
  if constexpr (!kFastPath) {
    if (has_scaled_scores<kFastPath>(p)) {
      const bool bias_first = p.fault.is(InjectedFault::softcap_after_bias);
      if (p.bias != nullptr && bias_first) add_bias<C, kKeys>(acc_s, t, s, p, first_key);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          apply_score_mods<C, kKeys>(acc_s[m], half, t.row(m, half), t, s, p, first_key);
        }
      }
      if (p.bias != nullptr && !bias_first) add_bias<C, kKeys>(acc_s, t, s, p, first_key);
    }
  }
  if constexpr (C::template kReadsMask<kFastPath>) {
    if (p.has_mask()) hide_masked_keys<C, kKeys>(acc_s, bits, t, first_key);
  }
  const bool all_visible =
      first_key >= keys.fully_visible.begin && first_key + kKeys <= keys.fully_visible.end;
  if (all_visible) return;  // warp-uniform
  hide_keys_by_position<C, kKeys>(acc_s, t, p, s.work, keys, first_key);
}

}  // namespace flashcore::cuda::sm80
