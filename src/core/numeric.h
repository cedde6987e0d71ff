// Constants and exact 16-bit float conversions, without the standard library.
#pragma once

#include <cstdint>

#include "core/config.h"

namespace flashcore::core {

inline constexpr double kLog2E = 1.4426950408889634074;
inline constexpr double kLn2 = 0.69314718055994530942;

/// Bit casts. std::bit_cast is an inline function of the standard library: see config.h.
FLASHCORE_HD float float_of_bits(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
FLASHCORE_HD std::uint32_t bits_of_float(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

FLASHCORE_HD float float_of_bf16(std::uint16_t bits) {
  return float_of_bits(static_cast<std::uint32_t>(bits) << 16);
}

/// Rounds to nearest, ties to even. NaN stays NaN.
FLASHCORE_HD std::uint16_t bf16_of_float(float value) {
  const std::uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

FLASHCORE_HD float float_of_f16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity or NaN: all exponent bits, same mantissa
    return float_of_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  // After the shift the exponent is 112 too small. One multiplication corrects it and normalises
  // subnormals.
  const float scaled = float_of_bits(magnitude << 13) * float_of_bits(0x77800000u);  // 2^112
  return float_of_bits(bits_of_float(scaled) | sign);
}

/// Rounds to nearest, ties to even; overflows to infinity.
FLASHCORE_HD std::uint16_t f16_of_float(float value) {
  const std::uint32_t bits = bits_of_float(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: the addition rounds at 2^-24
    const float aligned = float_of_bits(magnitude) + float_of_bits(0x3f000000u);  // + 0.5
    half = bits_of_float(aligned) - 0x3f000000u;
  } else {
    const std::uint32_t rebased = magnitude - 0x38000000u;  // exponent bias 127 -> 15
    half = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

}  // namespace flashcore::core
