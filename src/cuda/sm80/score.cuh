// Score modifications (scale, softcap, ALiBi, bias) and masks of a step.
#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm80/config.cuh"

namespace flashcore::cuda::sm80 {

/// Adds the bias to one row of S. g_bias: the row, [kv_len].
template <typename C, int kKeys, typename Bias>
__device__ __forceinline__ void add_bias(float (&acc_s)[kKeys / C::kTileWidth][4], int half,
                                         const Thread<C>& t, const Bias* g_bias,
                                         std::int64_t stride, std::int32_t first_key,
                                         KeyRange range) {
#pragma unroll
  for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int reg = C::reg_of(half, i);
      const std::int32_t key = first_key + t.column(n, reg);
      if (range.contains(key)) {
        acc_s[n][reg] += to_float(g_bias[key * stride]);
      }
    }
  }
}

template <typename C, int kKeys>
__device__ __forceinline__ void add_bias_row(float (&acc_s)[kKeys / C::kTileWidth][4], int half,
                                             const Thread<C>& t, const AttentionParams& p,
                                             std::int64_t offset, std::int32_t first_key,
                                             KeyRange range) {
  const auto add = [&](auto zero) {
    add_bias<C, kKeys>(acc_s, half, t, static_cast<const decltype(zero)*>(p.bias) + offset,
                       p.bias_strides.column, first_key, range);
  };
  if (p.bias_element == core::Element::f32) {
    add(0.f);
  } else {
    with_element<C>(p.bias_element, add);
  }
}

/// Scale, softcap, ALiBi, bias and boolean mask of one row of S (registers reg_of(half, …) of every
/// accumulator tile).
template <typename C, int kKeys>
__device__ __forceinline__ void apply_score_mods(float (&acc_s)[kKeys / C::kTileWidth][4], int half,
                                                 const Thread<C>& t, const AttentionParams& p,
                                                 const WorkTile& work, const Row& row,
                                                 KeyRange range, std::int32_t first_key) {
  const auto each = [&](auto change) {
#pragma unroll
    for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int reg = C::reg_of(half, i);
        change(acc_s[n][reg], first_key + t.column(n, reg));
      }
    }
  };
  if constexpr (!C::kKv8) {  // scale_scores() has scaled those
    const float factor = score_scale(p);
    each([&](float& x, std::int32_t) { x *= factor; });
  }
  const std::int64_t bias_row = work.b * p.bias_strides.batch + row.head * p.bias_strides.head +
                                row.query * p.bias_strides.row;
  const bool bias_first = p.fault.is(InjectedFault::softcap_after_bias);
  if (p.bias != nullptr && bias_first) {
    add_bias_row<C, kKeys>(acc_s, half, t, p, bias_row, first_key, range);
  }
  if (p.softcap > 0) {
    const float cap = static_cast<float>(p.softcap);
    each([&](float& x, std::int32_t) { x = capped_short(x, cap); });
  }
  if (p.alibi_slopes != nullptr) {
    const float slope =
        p.alibi_slopes[work.b * p.alibi_batch_stride + row.head * p.alibi_head_stride];
    const std::int64_t position = row.query + work.seq.mask.diagonal;
    each([&](float& x, std::int32_t key) {
      const float distance = static_cast<float>(position - key);
      x -= slope * (p.fault.is(InjectedFault::alibi_signed) ? distance : fabsf(distance));
    });
  }
  if (p.bias != nullptr && !bias_first) {
    add_bias_row<C, kKeys>(acc_s, half, t, p, bias_row, first_key, range);
  }
  if (p.mask != nullptr) {
    const std::int64_t b = p.fault.is(InjectedFault::mask_batch_ignored) ? 0 : work.b;
    const std::uint8_t* g_mask = p.mask + b * p.mask_strides.batch +
                                 row.head * p.mask_strides.head + row.query * p.mask_strides.row;
    each([&](float& x, std::int32_t key) {
      if (range.contains(key) && g_mask[key * p.mask_strides.column] == 0) {
        x = core::negative_infinity<float>();
      }
    });
  }
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
