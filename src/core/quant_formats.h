// The 8-bit formats: what a code means, and the code nearest to a value. Everybody who quantises,
// dequantises or reads 8-bit tensors asks here.
//
//   e4m3  sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7f and 0xff are NaN, nothing is inf
//   e5m2  sign, 5 exponent bits (bias 15), 2 mantissa bits; IEEE's infinities and NaN
//   int8  -127 … 127; -128 is read, never produced
//   byte  128 + int8, in steps of 448/127
//
// A value is decode(code) * format_step() * scale: the steps of the byte format are kept apart,
// so that everything decode() returns is exact in f16 and bf16 too.
#pragma once

#include "core/numeric.h"
#include "core/params.h"

namespace flashcore::core {

namespace detail {

/// significand * 2^shift, exact: a power of two by squaring, so that a compiler can do it too.
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

/// What a code stands for, in steps.
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

/// The largest finite value, in steps.
FLASHCORE_HD constexpr float largest_decoded(Element element) {
  return element == Element::e4m3 ? 448.f : element == Element::e5m2 ? 57344.f : 127.f;
}

FLASHCORE_HD constexpr bool has_nan(Element element) {
  return element == Element::e4m3 || element == Element::e5m2;
}

/// The bits of the smallest magnitude, in steps, that rounds past the largest finite code; those of
/// infinities and NaN are larger.
FLASHCORE_HD constexpr std::uint32_t saturates_from(Element element) {
  return element == Element::e4m3   ? 0x43e80001u   // 464 is half-way to 480, goes to 448: even
         : element == Element::e5m2 ? 0x47700000u   // 61440 is half-way to 65536 and would go there
                                    : 0x42ff0000u;  // 127.5
}

/// All codes of a format: for who reads many.
struct CodeTable {
  float value[256];
};
constexpr CodeTable code_table(Element element) {
  CodeTable table{};
  for (int code = 0; code < 256; ++code) {
    table.value[code] = decode(element, static_cast<std::uint8_t>(code));
  }
  return table;
}

struct Code {
  std::uint8_t bits;
  bool saturated;  // rounding to nearest would have left the finite codes
};

namespace detail {

/// An 8-bit float with `kMantissa` mantissa bits and this exponent bias, saturated from `too_large`
/// on.
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
    // Below the normal range: let the float adder round at the format's smallest step.
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

/// The code nearest to a value given in steps, ties to even. What lies beyond the largest finite
/// code, infinities too, becomes that. NaN stays NaN, or becomes 0 where !has_nan().
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

/// The scale under which the largest magnitude of a slice is the largest code; 1 for a slice of
/// zeros. Never so small that its reciprocal would overflow.
FLASHCORE_HD float scale_of_largest(Element element, float largest) {
  if (!(largest > 0.f)) return 1.f;
  const float scale = largest / (largest_decoded(element) * format_step(element));
  return scale < 0x1p-126f ? 0x1p-126f : scale;
}

/// What a value is multiplied by before encode(). A scale no positive f32 can invert counts as the
/// nearest that has a reciprocal.
FLASHCORE_HD float inverse_step(Element element, float scale) {
  const float step = scale * format_step(element);
  return 1.f / (step < 0x1p-126f ? 0x1p-126f : step);
}

/// What a code's value in steps is multiplied by.
FLASHCORE_HD float step_of(Element element, float scale) { return scale * format_step(element); }

/// What is left of four codes of q, k or v as they are read: all of it.
FLASHCORE_HD std::uint32_t code_mask(const AttentionParams& p) {
  return p.fault.is(InjectedFault::half_the_codes) ? 0x7f7f7f7fu : 0xffffffffu;
}

/// The row whose scale serves a row of q, k or v: itself.
FLASHCORE_HD std::int32_t scaled_as(const AttentionParams& p, std::int32_t row) {
  return p.fault.is(InjectedFault::scale_of_first_block) ? 0 : row;
}

/// What the codes of a row of q, k or v are multiplied by, whose scales these are.
FLASHCORE_HD float row_scale(const AttentionParams& p, Element element, const Scales& scales,
                             std::int32_t b, std::int32_t h, std::int32_t row) {
  return step_of(element, scales.at(b, h, scaled_as(p, row)));
}

}  // namespace flashcore::core
