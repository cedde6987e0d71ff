// The 8-bit formats: decoding and encoding. All code that quantizes, dequantizes or reads 8-bit
// tensors uses these functions.
//
//   e4m3  sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7f and 0xff are NaN; no infinities
//   e5m2  sign, 5 exponent bits (bias 15), 2 mantissa bits; IEEE infinities and NaN
//   int8  -127 … 127; -128 is read, never produced
//   u8    128 + int8, in units of 448/127; "byte" in the public interface
//
// A value is decode(code) * format_step() * scale. decode() omits the unit 448/127 of u8, so that
// its result is exact in f16 and bf16 for every format.
#pragma once

#include "core/numeric.h"
#include "core/params.h"

namespace flashcore::core {

namespace detail {

/// significand * 2^shift, exact. constexpr, unlike ldexp().
FLASHCORE_HD constexpr float scaled_by_power(int significand, int shift) {
  float power = 1.f;
  for (int i = 0; i < (shift < 0 ? -shift : shift); ++i) power *= shift < 0 ? 0.5f : 2.f;
  return static_cast<float>(significand) * power;
}

}  // namespace detail

FLASHCORE_HD constexpr float float_of_e4m3(std::uint8_t code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return __builtin_nanf("");
  const float size = exponent == 0 ? detail::scaled_by_power(mantissa, -9)
                                   : detail::scaled_by_power(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -size : size;
}

FLASHCORE_HD constexpr float float_of_e5m2(std::uint8_t code) {
  const int exponent = (code >> 2) & 31, mantissa = code & 3;
  if (exponent == 31 && mantissa != 0) return __builtin_nanf("");
  const float size = exponent == 31  ? __builtin_inff()
                     : exponent == 0 ? detail::scaled_by_power(mantissa, -16)
                                     : detail::scaled_by_power(4 + mantissa, exponent - 17);
  return (code & 0x80) != 0 ? -size : size;
}

/// The value of a code, in units of format_step().
FLASHCORE_HD constexpr float decode(Element element, std::uint8_t code) {
  switch (element) {
    case Element::e4m3: return float_of_e4m3(code);
    case Element::e5m2: return float_of_e5m2(code);
    case Element::int8: return static_cast<float>(static_cast<std::int8_t>(code));
    case Element::u8: return static_cast<float>(static_cast<int>(code) - 128);
    default: return 0.f;
  }
}

FLASHCORE_HD constexpr float format_step(Element element) {
  return element == Element::u8 ? 448.f / 127.f : 1.f;
}

/// The largest finite value, in units of format_step().
FLASHCORE_HD constexpr float largest_decoded(Element element) {
  return element == Element::e4m3 ? 448.f : element == Element::e5m2 ? 57344.f : 127.f;
}

FLASHCORE_HD constexpr bool has_nan(Element element) {
  return element == Element::e4m3 || element == Element::e5m2;
}

/// The f32 bits of the smallest magnitude, in units of format_step(), that rounds past the largest
/// finite value. The bits of infinities and NaN are larger.
FLASHCORE_HD constexpr std::uint32_t saturates_from(Element element) {
  return element == Element::e4m3   ? 0x43e80001u   // 464, half-way to 480, rounds down
         : element == Element::e5m2 ? 0x47700000u   // 61440, half-way to 65536, rounds up
                                    : 0x42ff0000u;  // 127.5
}

/// The decoded values of all codes, for loops over many elements.
struct DecodeTable {
  float value[256];
};
constexpr DecodeTable decode_table(Element element) {
  DecodeTable table{};
  for (int code = 0; code < 256; ++code) {
    table.value[code] = decode(element, static_cast<std::uint8_t>(code));
  }
  return table;
}

struct Code {
  std::uint8_t bits;
  bool saturated;  // rounding to nearest would pass the largest finite value
};

namespace detail {

/// Encodes a float with kMantissa mantissa bits and exponent bias kBias. Magnitudes whose bits are
/// at least `too_large` saturate to the code `largest`.
template <int kMantissa, int kBias>
FLASHCORE_HD Code float8_code(float value, std::uint8_t largest, std::uint32_t too_large) {
  const std::uint32_t bits = bits_of_float(value);
  const auto sign = static_cast<std::uint8_t>((bits >> 24) & 0x80u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint8_t>(sign | 0x7fu), false};
  if (magnitude >= too_large) return {static_cast<std::uint8_t>(sign | largest), true};
  constexpr int kShift = 23 - kMantissa;
  constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - kBias) << 23;
  std::uint32_t code;
  if (magnitude < kRebias + (1u << 23)) {
    // Subnormal: the float addition rounds to a multiple of the smallest subnormal.
    constexpr std::uint32_t kAligner = static_cast<std::uint32_t>(127 + 24 - kBias - kMantissa)
                                       << 23;
    code = bits_of_float(float_of_bits(magnitude) + float_of_bits(kAligner)) - kAligner;
  } else {
    const std::uint32_t rebased = magnitude - kRebias;
    code = (rebased + ((1u << (kShift - 1)) - 1) + ((rebased >> kShift) & 1u)) >> kShift;
  }
  return {static_cast<std::uint8_t>(sign | code), false};
}

FLASHCORE_HD float round_to_even(float value) {
#if defined(__CUDA_ARCH__)
  return ::rintf(value);
#else
  return __builtin_rintf(value);
#endif
}

}  // namespace detail

/// The code nearest to a value in units of format_step(), ties to even. Magnitudes beyond the
/// largest finite value, including infinities, saturate to it. NaN stays NaN, or becomes 0 if
/// !has_nan().
FLASHCORE_HD Code encode(Element element, float value) {
  if (element == Element::e4m3) {
    return detail::float8_code<3, 7>(value, 0x7e, saturates_from(element));
  }
  if (element == Element::e5m2) {
    return detail::float8_code<2, 15>(value, 0x7b, saturates_from(element));
  }
  int code = 0;
  bool saturated = false;
  if (value >= 127.5f || value <= -127.5f) {
    code = value > 0 ? 127 : -127;
    saturated = true;
  } else if (value == value) {
    code = static_cast<int>(detail::round_to_even(value));
  }
  return {static_cast<std::uint8_t>(element == Element::u8 ? code + 128 : code), saturated};
}

/// The scale that maps the largest magnitude of a slice to the largest code; 1 for a slice of
/// zeros. At least 2^-126, so that its reciprocal does not overflow.
FLASHCORE_HD float scale_of_largest(Element element, float largest) {
  if (!(largest > 0.f)) return 1.f;
  const float scale = largest / (largest_decoded(element) * format_step(element));
  return scale < 0x1p-126f ? 0x1p-126f : scale;
}

/// The factor of a value before encode(): 1 / step_of(). The step counts as at least 2^-126, so
/// that the reciprocal does not overflow.
FLASHCORE_HD float inverse_step(Element element, float scale) {
  const float step = scale * format_step(element);
  return 1.f / (step < 0x1p-126f ? 0x1p-126f : step);
}

/// The factor of decode().
FLASHCORE_HD float step_of(Element element, float scale) { return scale * format_step(element); }

/// ANDed with four codes of q, k or v as they are read. Clears bits under a fault only.
FLASHCORE_HD std::uint32_t code_mask(const AttentionParams& p) {
  return p.fault.is(InjectedFault::half_the_codes) ? 0x7f7f7f7fu : 0xffffffffu;
}

/// The row whose scale applies to `row` of q, k or v: `row` itself, except under a fault.
FLASHCORE_HD std::int32_t scaled_as(const AttentionParams& p, std::int32_t row) {
  return p.fault.is(InjectedFault::scale_of_first_block) ? 0 : row;
}

/// The factor of decode() for a row of q, k or v with these scales.
FLASHCORE_HD float row_scale(const AttentionParams& p, Element element, const Scales& scales,
                             std::int32_t b, std::int32_t h, std::int32_t row) {
  return step_of(element, scales.at(b, h, scaled_as(p, row)));
}

}  // namespace flashcore::core
