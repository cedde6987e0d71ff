// Q K^T of few rows for int8 and byte K, by integer dot products (VPDPBUSD).
//
//   Q[row] = unit[row] * Σ_i 256^i digit_i[row]     3 or 4 digits of 8 bits, exactly Q
//   S[row][key] = unit * scale * Σ_i 256^i (K[key] · digit_i)
//
// f16 and bf16 have few significant bits, so nearly every row of Q is a row of integers of 24 or 32
// bits times a power of two. Dot products of digits are exact in int32. Lanes are keys: K is
// transposed in blocks of 16 keys and 4 columns, so nothing is reduced across lanes. A row that
// needs more bits, or has a NaN, is multiplied in f32, like all rows of AVX-512 kernels. The bits
// of a row do not depend on other rows.
#pragma once

#include "cpu/kernels/gemv-inl.h"

namespace flashcore::cpu {
namespace {

inline constexpr int kMaxDigits = 4;

/// The lanes of a vector.
struct IntLanes {
  alignas(64) std::int32_t lane[16];
  explicit IntLanes(__m512i x) { _mm512_store_si512(lane, x); }
};

/// 2^n for a normal result.
FLASHCORE_HD float float_power_of_two(std::int32_t n) {
  const std::int32_t bits = (n + 127) << 23;
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

/// A row of Q as integers times `unit`. digit[i][d] is digit i of column d; columns behind the
/// head_dim are 0.
struct QueryDigits {
  std::int8_t digit[kMaxDigits][kMaxDim];
  std::int32_t offset[kMaxDigits];  // -128 times the sum of the digits: K is stored plus 128
  std::int32_t digits;              // 3 or 4; 0: the row is not such integers
  float unit;

  /// `q` has at least `padded` floats, a multiple of 16; those behind the head_dim are 0.
  void split(const float* q, std::int32_t padded) {
    *this = {};
    const std::int32_t exponent = largest_exponent(q, padded);
    // Far from the ends of the exponents' range, so that scores do not overflow sooner than in f32.
    constexpr std::int32_t kLargestExponent = 60;
    if (exponent < -kLargestExponent || exponent > kLargestExponent) return;
    // The largest element is below 2^30, so its top digit is at most 64.
    const std::int32_t shift = 29 - exponent;
    if (!is_exact(q, padded, float_power_of_two(shift))) return;
    split_integers(q, padded, float_power_of_two(shift));
    unit = float_power_of_two(digits == 4 ? -shift : 8 - shift);
  }

 private:
  /// The exponent of the largest magnitude; 128 if an element is infinite or NaN, 0 for zeros.
  static std::int32_t largest_exponent(const float* q, std::int32_t padded) {
    __m512i largest = _mm512_setzero_si512();
    for (std::int32_t d = 0; d < padded; d += kRowLanes) {
      const __m512i magnitude =
          _mm512_maskz_and_epi32(kAll16, _mm512_loadu_si512(q + d), _mm512_set1_epi32(0x7fffffff));
      largest = _mm512_maskz_max_epi32(kAll16, largest, magnitude);
    }
    std::int32_t bits = 0;
    for (const std::int32_t lane : IntLanes(largest).lane) bits = lane > bits ? lane : bits;
    return bits == 0 ? 0 : (bits >> 23) - 127;
  }

  /// Sets `digits` to 3 or 4 if the products of q and `factor` are integers.
  bool is_exact(const float* q, std::int32_t padded, float factor) {
    std::int32_t low_bits = 0;
    for (std::int32_t d = 0; d < padded; d += kRowLanes) {
      const __m512 scaled = (__m512)(load(q + d) * splat(factor));
      const __m512i integer = _mm512_maskz_cvtps_epi32(kAll16, scaled);
      const __m512 back = _mm512_maskz_cvtepi32_ps(kAll16, integer);
      if (_mm512_cmp_ps_mask(back, scaled, _CMP_NEQ_UQ) != 0) return false;
      low_bits |= _mm512_test_epi32_mask(integer, _mm512_set1_epi32(0xff));
    }
    digits = low_bits == 0 ? 3 : 4;
    return true;
  }

  /// Digits from the lowest, each between -128 and 127.
  void split_integers(const float* q, std::int32_t padded, float factor) {
    __m512i sum[kMaxDigits] = {};
    for (std::int32_t d = 0; d < padded; d += kRowLanes) {
      const __m512 scaled = (__m512)(load(q + d) * splat(factor));
      __m512i rest = _mm512_maskz_cvtps_epi32(kAll16, scaled);
      if (digits == 3) rest = _mm512_maskz_srai_epi32(kAll16, rest, 8);
      for (int i = 0; i < kMaxDigits; ++i) {
        const __m512i top = _mm512_maskz_slli_epi32(kAll16, rest, 24);
        const __m512i low = _mm512_maskz_srai_epi32(kAll16, top, 24);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(digit[i] + d),
                         _mm512_maskz_cvtepi32_epi8(kAll16, low));
        sum[i] = _mm512_maskz_add_epi32(kAll16, sum[i], low);
        const __m512i high = _mm512_maskz_sub_epi32(kAll16, rest, low);
        rest = _mm512_maskz_srai_epi32(kAll16, high, 8);
      }
    }
    for (int i = 0; i < kMaxDigits; ++i) {
      for (const std::int32_t lane : IntLanes(sum[i]).lane) offset[i] -= 128 * lane;
    }
  }
};

/// Transposes 4 x 4 elements of 32 bits in each 128-bit lane.
FLASHCORE_HD void transpose_4x4_lanes(__m512i (&r)[4]) {
  const __m512i a = _mm512_maskz_unpacklo_epi32(kAll16, r[0], r[1]);
  const __m512i b = _mm512_maskz_unpackhi_epi32(kAll16, r[0], r[1]);
  const __m512i c = _mm512_maskz_unpacklo_epi32(kAll16, r[2], r[3]);
  const __m512i d = _mm512_maskz_unpackhi_epi32(kAll16, r[2], r[3]);
  r[0] = _mm512_maskz_unpacklo_epi64(kAll8, a, c);
  r[1] = _mm512_maskz_unpackhi_epi64(kAll8, a, c);
  r[2] = _mm512_maskz_unpacklo_epi64(kAll8, b, d);
  r[3] = _mm512_maskz_unpackhi_epi64(kAll8, b, d);
}

/// 16 keys, transposed: lane `key` of column[c] has columns 4 c to 4 c + 3 of a key, plus 128.
struct KeyBlock {
  __m512i column[kMaxDim / 4];

  /// The first `count` of 16 rows; the other lanes repeat the last of them.
  template <typename Storage>
  void load_rows(const Storage* const* rows, std::int32_t count, std::int32_t head_dim) {
    constexpr bool kHasOffset = kIsSame<Storage, Code<core::Element::u8>>;
    const __m512i flip = _mm512_set1_epi8(kHasOffset ? 0 : -128);
    const Storage* row[kRowLanes];
    for (int i = 0; i < kRowLanes; ++i) row[i] = rows[i < count ? i : count - 1];
    std::int32_t d = 0;
    for (; d + 16 <= head_dim; d += 16) {
      load_16_columns(row, d, flip, [](const Storage* from) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      });
    }
    if (d < head_dim) {
      const auto mask = static_cast<__mmask16>((1u << (head_dim - d)) - 1u);
      load_16_columns(row, d, flip,
                      [&](const Storage* from) { return _mm_maskz_loadu_epi8(mask, from); });
    }
  }

 private:
  /// Key 4 L + i of each lane L goes to vector i; a transposition in lanes does the rest.
  template <typename Storage, typename Load>
  FLASHCORE_HD void load_16_columns(const Storage* const* row, std::int32_t d, __m512i flip,
                                    Load load) {
    __m512i keys[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __m512i lanes = _mm512_maskz_broadcast_i32x4(kAll16, load(row[i] + d));
      lanes = _mm512_mask_broadcast_i32x4(lanes, 0x00f0, load(row[4 + i] + d));
      lanes = _mm512_mask_broadcast_i32x4(lanes, 0x0f00, load(row[8 + i] + d));
      lanes = _mm512_mask_broadcast_i32x4(lanes, 0xf000, load(row[12 + i] + d));
      keys[i] = _mm512_maskz_xor_epi32(kAll16, lanes, flip);
    }
    transpose_4x4_lanes(keys);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) column[d / 4 + i] = keys[i];
  }
};

typedef std::int32_t FourDigits __attribute__((may_alias, aligned(1)));

/// Adds the products of columns 4 c to 4 c + 3 of B blocks of keys and four digits of a row. GCC 12
/// copies every sum twice around the intrinsic, and does not broadcast the digits from memory.
template <int B>
FLASHCORE_HD void add_products(__m512i (&sum)[B], const KeyBlock* k, std::int32_t c,
                               const std::int8_t* digits) {
  const FourDigits& four = *reinterpret_cast<const FourDigits*>(digits);
  if constexpr (B == 1) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum[0]) : "v"(k[0].column[c]), "m"(four));
  } else {
    const __m512i same = _mm512_set1_epi32(four);
    for (int b = 0; b < B; ++b) {
      asm("vpdpbusd %2, %1, %0" : "+v"(sum[b]) : "v"(k[b].column[c]), "v"(same));
    }
  }
}

/// factor * Σ 256^i (K · digit_i) of R rows and 16 B keys. Rows of three digits have a fourth of 0.
/// Fetches the next rows one after the other: many at once would wait for memory.
template <int R, int D, int B, typename Storage>
void multiply_digits(float* scores, std::int32_t pitch, const __mmask16* keys, const KeyBlock* k,
                     const QueryDigits* q, std::int32_t head_dim, const float* factor,
                     const NextRows<Storage>& next) {
  const std::int32_t steps = (head_dim + 3) / 4, fetched = (next.count + steps - 1) / steps;
  __m512i acc[R][D][B];
#pragma GCC unroll 32
  for (int i = 0; i < R * D * B; ++i) {
    acc[i / B / D][i / B % D][i % B] = _mm512_set1_epi32(q[i / B / D].offset[i / B % D]);
  }
  for (std::int32_t c = 0; c < steps; ++c) {
    for (std::int32_t i = 0; i < fetched; ++i) next.fetch(c * fetched + i);
#pragma GCC unroll 32
    for (int i = 0; i < R * D; ++i) {
      const std::int8_t* digits = q[i / D].digit[i % D] + c * 4;
      add_products(acc[i / D][i % D], k, c, digits);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R * B; ++i) {
    const int r = i / B, block = i % B;
    Vec<float> sum[D];
#pragma GCC unroll 4
    for (int digit = 0; digit < D; ++digit) {
      sum[digit] = (Vec<float>)_mm512_maskz_cvtepi32_ps(kAll16, acc[r][digit][block]);
    }
    Vec<float> dot = mul_add(sum[1], splat(256.f), sum[0]);
    float place = 65536.f;
#pragma GCC unroll 4
    for (int digit = 2; digit < D; ++digit, place *= 256.f) {
      dot = mul_add(sum[digit], splat(place), dot);
    }
    _mm512_mask_storeu_ps(scores + r * pitch + block * kRowLanes, keys[block],
                          (__m512)(dot * splat(factor[r])));
  }
}

/// S = Q K^T of int8 and byte K by integers. Other kernels are for other K, which is copied here.
template <typename QueryStorage>
class IntegerDots {
 public:
  template <typename Storage>
  static constexpr bool kInPlace =
      kIsSame<Storage, Code<core::Element::int8>> || kIsSame<Storage, Code<core::Element::u8>>;

  explicit IntegerDots(const WorkTile<float>& work) {
    const AttentionParams& p = work.params;
    alignas(64) float values[kMaxDim];
    const std::int32_t padded = (p.head_dim + kRowLanes - 1) / kRowLanes * kRowLanes;
    for (std::int32_t row = 0; row < work.rows; ++row) {
      for (std::int32_t d = p.head_dim; d < padded; ++d) values[d] = 0.f;
      const float scale = load_query_values<float, QueryStorage>(values, work, row);
      q_[row].split(values, padded);
      factor_[row] = q_[row].unit * (scale * core::score_scale<float>(p));
    }
  }

  template <typename Storage>
  void score(const WorkTile<float>& work, std::int32_t pitch, const TileRows<Storage>& k,
             std::int32_t keys, NextRows<Storage> next) const {
    std::int32_t key = 0;
    for (; keys - key > kRowLanes; key += 2 * kRowLanes) {
      score_blocks<2>(work, pitch, k, key, keys - key, next);
    }
    if (key < keys) score_blocks<1>(work, pitch, k, key, keys - key, next);
    score_other_rows(work, pitch, k, keys);
  }

 private:
  /// Scores of the first `left` of 16 B keys from `key` on.
  template <int B, typename Storage>
  void score_blocks(const WorkTile<float>& work, std::int32_t pitch, const TileRows<Storage>& k,
                    std::int32_t key, std::int32_t left, const NextRows<Storage>& next) const {
    KeyBlock block[B];
    __mmask16 mask[B];
    for (std::int32_t b = 0; b < B; ++b) {
      const std::int32_t first = key + b * kRowLanes, rest = left - b * kRowLanes;
      const std::int32_t count = rest < kRowLanes ? rest : kRowLanes;
      mask[b] = static_cast<__mmask16>((1u << count) - 1u);
      block[b].load_rows(k.row + first, count, work.params.head_dim);
    }
    NextRows<Storage> here = next;
    here.row += key;
    here.count = left < B * kRowLanes ? left : B * kRowLanes;
    for_row_blocks(work.rows, [&]<int R>(std::int32_t row) {
      multiply_rows<R, B>(work.scores + row * pitch + key, pitch, mask, block, row,
                          work.params.head_dim, here);
      here.count = 0;
    });
  }

  /// Four digits of two blocks and four rows would not fit the registers.
  template <int R, int B, typename Storage>
  void multiply_rows(float* scores, std::int32_t pitch, const __mmask16* keys,
                     const KeyBlock* block, std::int32_t row, std::int32_t head_dim,
                     NextRows<Storage> next) const {
    std::int32_t digits = 0;
    for (int r = 0; r < R; ++r) {
      digits = digits < q_[row + r].digits ? q_[row + r].digits : digits;
    }
    const QueryDigits* q = q_ + row;
    const float* factor = factor_ + row;
    if (digits == 3) {
      multiply_digits<R, 3, B>(scores, pitch, keys, block, q, head_dim, factor, next);
    } else if (digits == 4) {
      for (int b = 0; b < B; ++b) {
        multiply_digits<R, 4, 1>(scores + b * kRowLanes, pitch, keys + b, block + b, q, head_dim,
                                 factor, next);
        next.count = 0;
      }
    }
  }

  /// Rows that are not integers.
  template <typename Storage>
  void score_other_rows(const WorkTile<float>& work, std::int32_t pitch, const TileRows<Storage>& k,
                        std::int32_t keys) const {
    const std::int32_t head_dim = work.params.head_dim;
    const float* q = static_cast<const float*>(work.q_tile);
    for (std::int32_t row = 0; row < work.rows; ++row) {
      if (q_[row].digits != 0) continue;
      for (std::int32_t key = 0; key < keys; key += kRowLanes) {
        const std::int32_t left = keys - key;
        score_block<1>(work.scores + row * pitch + key, pitch, q + row * head_dim, head_dim,
                       k.row + key, left < kRowLanes ? left : kRowLanes);
      }
    }
  }

  QueryDigits q_[core::kGemvRows];
  float factor_[core::kGemvRows];
};

}  // namespace
}  // namespace flashcore::cpu
