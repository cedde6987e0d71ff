// The softmax of a panel between the products of AMX (gemm_amx-inl.h): row statistics, and P in
// bf16, rounded or in parts.
#pragma once

#include <immintrin.h>

#include "core/softmax.h"
#include "cpu/kernels/amx_parts-inl.h"
#include "cpu/kernels/score-inl.h"

namespace flashcore::cpu {
namespace {

/// 2^x for x <= 100, 0 for -inf, NaN for NaN. Relative error below 2e-7: P is rounded to bf16, but
/// its sum is not.
FLASHCORE_HD __m512 exp2_tile(__m512 x) {
  const __m512 f = _mm512_maskz_reduce_ps(kAll16, x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
  __m512 p = _mm512_set1_ps(1.8671300e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.0170307e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5799913e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4016444e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9315130e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(kAll16, p, x);  // p * 2^floor(x)
}

/// A pair of keys' P in bf16, in the halves of each lane; ties round up. NaN may become 0, but the
/// row's sum is then NaN.
FLASHCORE_HD __m512i pack_pair(__m512 even, __m512 odd) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low =
      _mm512_maskz_srli_epi32(kAll16, _mm512_add_epi32(_mm512_castps_si512(even), half), 16);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
  return _mm512_mask_blend_epi16(0xaaaaaaaau, low, high);
}

/// P of a score that lacks `factor`. The product is rounded, as in calls whose score options follow
/// it. opaque() keeps the compiler from fusing it with the subtraction.
template <int kParts>
FLASHCORE_HD __m512 weight_of(__m512 score, __m512 factor, __m512 base) {
  const __m512 x = _mm512_sub_ps(opaque(_mm512_mul_ps(score, factor)), base);
  if constexpr (kParts > 1) return (__m512)exp<float>((Vec<float>)x);
  const __m512 log2_e = _mm512_set1_ps(static_cast<float>(core::kLog2E));
  return exp2_tile(_mm512_mul_ps(x, log2_e));
}

/// The row statistics of a panel while its KV tile is processed.
template <int V>
struct AmxRowStats {
  static constexpr int kRows = kAmxTileRows;

  Vec<float> max[V], base[V];
  Vec<float> sum[V], tile_sum[V];  // of the tiles before and of this one

  AmxRowStats(const WorkTile<float>& work, std::int32_t row) {
    for (int v = 0; v < V; ++v) {
      max[v] = load(work.max + row + v * kRows);
      sum[v] = load(work.sum + row + v * kRows);
      tile_sum[v] = splat(0.f);
      set_base(v);
    }
  }
  void save(const WorkTile<float>& work, std::int32_t row) const {
    for (int v = 0; v < V; ++v) {
      store(work.max + row + v * kRows, max[v]);
      store(work.sum + row + v * kRows, sum[v] + tile_sum[v]);
    }
  }
  /// core::softmax_base() of every lane. max is never NaN, so below `lowest` there is only -inf.
  FLASHCORE_HD void set_base(int v) {
    base[v] = select_less(max[v], splat(-__FLT_MAX__), splat(0.f), max[v]);
  }

  /// Lets the maxima grow to those of new scores, which still lack the factor `scale` > 0. Returns
  /// true if one has grown; `rescale` are then the factors of the rows' sums and outputs.
  FLASHCORE_HD bool grow(const float* scores, std::int32_t keys, float scale, core::Fault fault,
                         Vec<float> (&rescale)[V]) {
    Vec<float> even[V], odd[V];
    for (int v = 0; v < V; ++v) even[v] = odd[v] = splat(core::negative_infinity<float>());
    std::int32_t key = 0;
    for (; key + 2 <= keys; key += 2) {
      for (int v = 0; v < V; ++v) {
        even[v] = max_ignore_nan<float>(even[v], load(scores + (key * V + v) * kRows));
        odd[v] = max_ignore_nan<float>(odd[v], load(scores + ((key + 1) * V + v) * kRows));
      }
    }
    __mmask16 grown[V], any = 0;
    for (int v = 0; v < V; ++v) {
      if (key < keys)
        even[v] = max_ignore_nan<float>(even[v], load(scores + (key * V + v) * kRows));
      even[v] = max_ignore_nan<float>(even[v], odd[v]) * splat(scale);
      grown[v] = _mm512_cmp_ps_mask((__m512)max[v], (__m512)even[v], _CMP_LT_OQ);
      any |= grown[v];
    }
    if (any == 0) return false;
    for (int v = 0; v < V; ++v) {
      const Vec<float> old = max[v];
      max[v] = (Vec<float>)_mm512_mask_mov_ps((__m512)old, grown[v], (__m512)even[v]);
      set_base(v);
      rescale[v] = exp<float>(old - base[v]);
      if (fault.is(InjectedFault::rescale_forgotten)) rescale[v] = splat(1.f);
      sum[v] = sum[v] * rescale[v];
      tile_sum[v] = tile_sum[v] * rescale[v];
    }
    return true;
  }

  /// P of up to 32 keys as V tiles for each part, 0 behind them. The sums add P before it is
  /// rounded or split.
  template <int kParts>
  FLASHCORE_HD void exponentiate(char* p, std::int64_t p_part, const float* scores,
                                 std::int32_t keys, float scale) {
    constexpr std::int32_t kStep = AmxPairs<kParts>::kStep;
    constexpr std::int32_t kDistance = AmxPairs<kParts>::kDistance;
    const auto store_pair = [&](std::int32_t pair, int v, __m512 even, __m512 odd) {
      __m512i part[kParts];
      if constexpr (kParts == 1) {
        part[0] = pack_pair(even, odd);
      } else {
        split(even, odd, part, first_bits);
      }
#pragma GCC unroll 3
      for (int i = 0; i < kParts; ++i) {
        _mm512_store_si512(p + i * p_part + v * kAmxTileBytes + pair * kAmxRowBytes, part[i]);
      }
    };
    const __m512 factor = _mm512_set1_ps(scale);
    const auto weight = [&](std::int32_t key, int v) {
      const __m512 score = _mm512_load_ps(scores + (key * V + v) * kRows);
      return weight_of<kParts>(score, factor, (__m512)base[v]);
    };
    Vec<float> step_sum[V];
    for (int v = 0; v < V; ++v) step_sum[v] = splat(0.f);
    std::int32_t pair = 0;
    for (; pair * kStep + kDistance < keys; ++pair) {
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        const __m512 even = weight(pair * kStep, v), odd = weight(pair * kStep + kDistance, v);
        step_sum[v] = step_sum[v] + (Vec<float>)even + (Vec<float>)odd;
        store_pair(pair, v, even, odd);
      }
    }
    const __m512 zero = _mm512_setzero_ps();
    for (int v = 0; v < V; ++v) {
      std::int32_t rest = pair;
      for (; rest < 16 && rest * kStep < keys; ++rest) {
        const __m512 even = weight(rest * kStep, v);
        step_sum[v] = step_sum[v] + (Vec<float>)even;
        store_pair(rest, v, even, zero);
      }
      for (; rest < 16; ++rest) store_pair(rest, v, zero, zero);
      tile_sum[v] = tile_sum[v] + step_sum[v];
    }
  }
};

/// Multiplies a panel's output by the factors of its rows.
template <int V>
void rescale_output(float* out, std::int64_t v_dim, const Vec<float> (&rescale)[V]) {
  for (std::int64_t i = 0; i < v_dim; ++i, out += V * kLanes<float>) {
    for (int v = 0; v < V; ++v) {
      store(out + v * kLanes<float>, load(out + v * kLanes<float>) * rescale[v]);
    }
  }
}

}  // namespace
}  // namespace flashcore::cpu
