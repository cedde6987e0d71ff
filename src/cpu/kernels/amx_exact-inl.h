// Scores of operands that AMX cannot multiply in parts: infinities, NaN and huge numbers
// (gemm_amx-inl.h).
#pragma once

#include <immintrin.h>

#include "cpu/kernels/amx_parts-inl.h"
#include "cpu/kernels/load-inl.h"

namespace flashcore::cpu {
namespace {

/// True if one of `count` vectors of scores has a NaN.
FLASHCORE_HD bool any_nan(const float* scores, std::int32_t count) {
  __mmask16 found = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    const __m512 x = _mm512_load_ps(scores + i * kLanes<float>);
    found |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  }
  return found != 0;
}

/// A row of Q or K in f32, 0 up to a whole vector.
struct alignas(64) AmxExactRow {
  float column[kMaxDim];
};

inline float dot_product(const AmxExactRow& a, const AmxExactRow& b, std::int32_t head_dim) {
  Vec<float> sum = splat(0.f);
  for (std::int32_t d = 0; d < head_dim; d += kLanes<float>) {
    sum = mul_add(load(a.column + d), load(b.column + d), sum);
  }
  float lanes[kLanes<float>], total = 0;
  store(lanes, sum);
  for (const float x : lanes) total = total + x;
  return total;
}

/// Computes the scores of `keys` that are NaN again, as products of vectors: an element that is
/// infinite, NaN or huge makes them NaN, and infinities would give NaN times a part that is 0. No
/// other row's scores depend on it.
template <typename Storage, int V>
void replace_nan_scores(const WorkTile<float>& work, float* scores, const core::KvRowMap& map,
                        std::int32_t panel_row, KeyRange keys, float power) {
  constexpr std::int32_t kRows = V * kLanes<float>;
  const AttentionParams& p = work.params;
  const std::int32_t rows = work.rows - panel_row < kRows ? work.rows - panel_row : kRows;
  const KeyRange visible = core::intersect(keys, visible_to_tile(work));
  AmxExactRow q, k;
  for (std::int32_t d = 0; d < kMaxDim; ++d) q.column[d] = k.column[d] = 0.f;
  for (std::int32_t row = 0; row < rows; ++row) {
    bool has_q = false;
    for (std::int32_t key = visible.begin; key < visible.end; ++key) {
      float& score = scores[(key - keys.begin) * kRows + row];
      if (score == score) continue;
      if (!has_q) load_query<float, Storage>(q.column, work, panel_row + row, power);
      has_q = true;
      load_tile<float, Storage>(k.column, k_tensor(p), work, map, {key, key + 1});
      score = dot_product(q, k, p.head_dim);
    }
  }
}

}  // namespace
}  // namespace flashcore::cpu
