// The operands of AMX: bf16 tiles, numbers as sums of bf16 parts, and rows in memory
// (gemm_amx-inl.h).
#pragma once

#include <immintrin.h>

#include "core/scratch.h"
#include "cpu/kernels/gemm-inl.h"

namespace flashcore::cpu {
namespace {

/// A tile of 16 rows of 64 bytes.
inline constexpr std::int64_t kAmxTileBytes = 1024;
inline constexpr int kAmxTileRows = 16, kAmxRowBytes = 64;
inline constexpr std::int32_t kAmxKeyStep = 32;  // keys of a tile of V^T or P^T

/// How Storage becomes bf16: the parts of Q, K and V, and of P. 8 bits of a significand fit in a
/// part: 1 part is bf16 itself, 2 are exact for f16, and 3 for f32.
template <typename Storage>
struct AmxFormat;
template <>
struct AmxFormat<Bf16> {
  static constexpr int kParts = 1, kWeightParts = 1;
  static constexpr core::CpuOperands kOperands = core::CpuOperands::bf16_tiles;
};
template <>
struct AmxFormat<F16> {
  static constexpr int kParts = 2, kWeightParts = 3;
  static constexpr core::CpuOperands kOperands = core::CpuOperands::two_bf16_tiles;
};
template <>
struct AmxFormat<float> {
  static constexpr int kParts = 3, kWeightParts = 3;
  static constexpr core::CpuOperands kOperands = core::CpuOperands::three_bf16_tiles;
};
template <typename Storage>
inline constexpr bool kIsAmxFormat = AmxFormat<Storage>::kParts ==
                                         core::operand_parts(AmxFormat<Storage>::kOperands) &&
                                     AmxFormat<Storage>::kWeightParts
                                         == core::weight_parts(AmxFormat<Storage>::kOperands);
static_assert(kIsAmxFormat<Bf16> && kIsAmxFormat<F16> && kIsAmxFormat<float>);

/// The keys of a pair of P and V: kStep * i and kStep * i + kDistance, for i < 16. split() takes
/// the two from different vectors.
template <int kParts>
struct AmxPairs {
  static constexpr std::int32_t kStep = kParts == 1 ? 2 : 1, kDistance = kParts == 1 ? 1 : 16;
};

/// Calls use(a, b) for the pairs of parts whose product counts, except the first parts of both:
/// the smallest products first. Part i is at most 2^-8i of the number, and products below 2^-24 of
/// the whole are left out.
template <int kA, int kB, typename Use>
FLASHCORE_HD void for_small_products(Use use) {
#pragma GCC unroll 2
  for (int order = 2; order >= 1; --order) {
#pragma GCC unroll 3
    for (int a = 0; a < kA; ++a) {
      const int b = order - a;
      if (b >= 0 && b < kB) use(a, b);
    }
  }
}

/// Tiles of `dim` columns of K or V.
FLASHCORE_HD std::int64_t amx_dim_tiles(std::int64_t dim) {
  return core::padded_dim(core::CpuOperands::bf16_tiles, dim) / core::kBf16TileDim;
}
FLASHCORE_HD std::int64_t amx_key_blocks(std::int32_t keys) {
  return (keys + kAmxKeyStep - 1) / kAmxKeyStep;
}

/// x without the bits that bf16 has no room for.
FLASHCORE_HD __m512 first_bits(__m512 x) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(-0x10000)));
}

/// The nearest bf16; ties round away from 0.
FLASHCORE_HD __m512 nearest_bf16(__m512 x) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  return first_bits(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), half)));
}

/// The high halves of the lanes, in pairs.
FLASHCORE_HD __m512i pair_high_halves(__m512 low, __m512 high) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau,
                                 _mm512_maskz_srli_epi32(kAll16, _mm512_castps_si512(low), 16),
                                 _mm512_castps_si512(high));
}

/// Splits numbers into bf16 parts, pairs of a lane of `low` and one of `high`. first_part() has 8
/// bits of a number, the nearest or the first ones. The parts add up to the number if it has no
/// more than 8 bits per part.
template <int kParts, typename FirstPart>
FLASHCORE_HD void split(__m512 low, __m512 high, __m512i (&part)[kParts], FirstPart first_part) {
#pragma GCC unroll 3
  for (int i = 0; i < kParts - 1; ++i) {
    const __m512 of_low = first_part(low), of_high = first_part(high);
    part[i] = pair_high_halves(of_low, of_high);
    low = _mm512_sub_ps(low, of_low);
    high = _mm512_sub_ps(high, of_high);
  }
  part[kParts - 1] = pair_high_halves(low, high);
}

/// The score scale as a power of two, with its sign, times a positive rest. Q times the power is
/// exact in bf16, so large scores overflow no earlier than they would with a scaled Q.
struct AmxQScale {
  float power = 0, rest = 1;

  explicit AmxQScale(float scale) {
    if (scale == 0) return;
    constexpr std::int32_t kBias = 127, kLargest = 64;  // products stay away from the ends of f32
    const std::uint32_t bits = core::bits_of_float(scale);
    std::int32_t exponent = static_cast<std::int32_t>(bits >> 23 & 0xff) - kBias;
    if (exponent > kLargest) exponent = kLargest;
    if (exponent < -kLargest) exponent = -kLargest;
    power = core::float_of_bits((bits & 0x80000000u) | static_cast<std::uint32_t>(exponent + kBias)
                                                           << 23);
    rest = scale / power;
  }
};

/// Pairs of bf16 times a power of two.
FLASHCORE_HD __m512i multiply_pairs(__m512i pairs, __m512 power) {
  const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512 low = _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll16, pairs, 16));
  const __m512 high = _mm512_castsi512_ps(_mm512_and_si512(pairs, high_half));
  const __m512i low_bits = _mm512_castps_si512(_mm512_mul_ps(low, power));
  const __m512i high_bits = _mm512_castps_si512(_mm512_mul_ps(high, power));
  return _mm512_or_si512(_mm512_maskz_srli_epi32(kAll16, low_bits, 16),
                         _mm512_and_si512(high_bits, high_half));
}

/// Hides a value's origin from the compiler.
FLASHCORE_HD __m512 opaque(__m512 x) {
  __asm__("" : "+v"(x));
  return x;
}

/// 32 columns of a row in registers: bf16 as they are, other formats as f32.
template <typename Storage>
struct AmxColumns {
  __m512 low, high;
};
template <>
struct AmxColumns<Bf16> {
  __m512i values;
};

FLASHCORE_HD AmxColumns<Bf16> widen_columns(__m512i columns, const Bf16*) { return {columns}; }
FLASHCORE_HD AmxColumns<F16> widen_columns(__m512i columns, const F16*) {
  return {_mm512_maskz_cvtph_ps(kAll16, _mm512_maskz_extracti64x4_epi64(kAll8, columns, 0)),
          _mm512_maskz_cvtph_ps(kAll16, _mm512_maskz_extracti64x4_epi64(kAll8, columns, 1))};
}

/// Columns [first, first + 32) that are adjacent.
template <typename Storage>
FLASHCORE_HD AmxColumns<Storage> load_whole(const Storage* from) {
  return widen_columns(_mm512_loadu_si512(from), from);
}
FLASHCORE_HD AmxColumns<float> load_whole(const float* from) {
  return {_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16)};
}

/// `left` columns that are adjacent, 0 behind them.
template <typename Storage>
FLASHCORE_HD AmxColumns<Storage> load_first(const Storage* from, std::int32_t left) {
  const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1;
  return widen_columns(_mm512_maskz_loadu_epi16(mask, from), from);
}
FLASHCORE_HD AmxColumns<float> load_first(const float* from, std::int32_t left) {
  const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1;
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from),
          _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + 16)};
}

/// A row in memory; null: zeros.
template <typename Storage>
struct AmxRow {
  const Storage* data;
  std::int64_t column_stride;

  /// Columns [first, first + 32), 0 from `columns` on. kWhole: all of them are in memory, adjacent.
  template <bool kWhole = false>
  FLASHCORE_HD AmxColumns<Storage> load(std::int32_t first, std::int32_t columns) const {
    if constexpr (kWhole) return load_whole(data + first);
    const std::int32_t left = columns - first;
    alignas(64) Storage row[32] = {};
    if (data == nullptr || left <= 0) return load_whole(row);
    if (column_stride == 1) return load_first(data + first, left);
    for (std::int32_t c = 0; c < 32 && c < left; ++c) row[c] = data[(first + c) * column_stride];
    return load_whole(row);
  }
};

}  // namespace
}  // namespace flashcore::cpu
