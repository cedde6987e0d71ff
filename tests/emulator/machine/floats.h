// Floating-point formats and functions of the GPU.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace flashcore::emulator {

using Half = _Float16;

inline float half_to_float(std::uint16_t bits) {
  return static_cast<float>(std::bit_cast<Half>(bits));
}
/// Rounds to the nearest, NaN to the canonical 0x7fff.
inline std::uint16_t float_to_half(float x) {
  return x != x ? std::uint16_t{0x7fff} : std::bit_cast<std::uint16_t>(static_cast<Half>(x));
}
inline float bfloat_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}
inline std::uint16_t float_to_bfloat(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return x != x ? std::uint16_t{0x7fff} : static_cast<std::uint16_t>(rounded);
}

inline bool is_subnormal(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  return (bits & 0x7f800000u) == 0 && (bits & 0x7fffffu) != 0;
}
inline float flush(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  return std::bit_cast<float>((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
}

/// 2^x in double precision without a branch, so that loops over it become vector code. The relative
/// error is below 2^-40; the result is then rounded to float.
inline float exp2_of(float x) {
  const double bounded = x < -200.f ? -200.0 : x > 200.f ? 200.0 : static_cast<double>(x);
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adds an integer in the low bits
  const double shifted = bounded + kRound;
  const double f = (bounded - (shifted - kRound)) * 0.69314718055994530942;
  double p = 1.0 / 39916800;
  p = p * f + 1.0 / 3628800;
  p = p * f + 1.0 / 362880;
  p = p * f + 1.0 / 40320;
  p = p * f + 1.0 / 5040;
  p = p * f + 1.0 / 720;
  p = p * f + 1.0 / 120;
  p = p * f + 1.0 / 24;
  p = p * f + 1.0 / 6;
  p = p * f + 0.5;
  p = p * f + 1.0;
  p = p * f + 1.0;
  const std::int64_t exponent = std::bit_cast<std::int64_t>(shifted) << 52;
  const auto scaled = std::bit_cast<double>(std::bit_cast<std::int64_t>(p) + exponent);
  return x != x ? x : static_cast<float>(scaled);
}

/// The 8-bit formats. `kMantissa` is 3 for e4m3 (no infinity) and 2 for e5m2.
template <int kMantissa>
inline float decode_fp8(std::uint8_t code) {
  constexpr int kBias = kMantissa == 3 ? 7 : 15;
  const int exponent = (code & 0x7f) >> kMantissa, mantissa = code & ((1 << kMantissa) - 1);
  float value;
  if (kMantissa == 3 ? (code & 0x7f) == 0x7f : exponent == 31 && mantissa != 0) {
    return std::bit_cast<float>(0x7fffffffu);
  }
  if (kMantissa == 2 && exponent == 31) {
    value = INFINITY;
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(mantissa), 1 - kBias - kMantissa);
  } else {
    value =
        std::ldexp(static_cast<float>(mantissa + (1 << kMantissa)), exponent - kBias - kMantissa);
  }
  return (code & 0x80) != 0 ? -value : value;
}

/// Rounds to the nearest even code; values beyond the range become the largest finite one.
template <int kMantissa>
inline std::uint8_t encode_fp8(float x) {
  constexpr int kBias = kMantissa == 3 ? 7 : 15;
  constexpr std::uint8_t kLargest = kMantissa == 3 ? 0x7e : 0x7b;
  const std::uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (x != x) return 0x7f;
  const float magnitude = std::fabs(x);
  if (magnitude >= decode_fp8<kMantissa>(kLargest))
    return static_cast<std::uint8_t>(sign | kLargest);
  if (magnitude == 0.f) return sign;
  const int exponent = std::ilogb(magnitude);
  const int unit = std::max(exponent, 1 - kBias) - kMantissa;
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -unit)));
  // Steps of a subnormal are its code; a carry into the exponent gives the next code as well.
  const int base = (unit + kMantissa + kBias - 1) << kMantissa;
  return static_cast<std::uint8_t>(sign | (base + steps));
}

}  // namespace flashcore::emulator
