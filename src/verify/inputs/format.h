// Number formats of an implementation under test. An 8-bit value is decode(byte) * scale.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "flashcore/verify_c.h"

namespace flashcore::verify {

enum class Format : std::int32_t { f64, f32, f16, bf16, e4m3, e5m2, int8, byte8 };

const char* to_string(Format format);
std::optional<Format> format_named(std::string_view name);
flashcore_dtype c_dtype(Format format);

constexpr bool is_8bit(Format format) { return format >= Format::e4m3; }
constexpr std::int64_t size_of(Format format) {
  return format == Format::f64 ? 8 : format == Format::f32 ? 4 : is_8bit(format) ? 1 : 2;
}

/// Unit roundoff; twice that for f64, because the oracle rounds too. For the fixed-point formats
/// int8 and byte: half a step at the largest value.
double unit_of(Format format);
/// Spacing at 0; smaller values may be flushed.
double smallest_of(Format format);

/// Value of one encoding of an 8-bit format.
double decode_byte(Format format, std::uint8_t code);

/// For formats narrower than f32.
double decode_narrow(Format format, const void* data, std::int64_t index);
void encode_narrow(Format format, void* data, std::int64_t index, double value);

inline double decode(Format format, const void* data, std::int64_t index) {
  if (format == Format::f32) return static_cast<const float*>(data)[index];
  if (format == Format::f64) return static_cast<const double*>(data)[index];
  return decode_narrow(format, data, index);
}
/// Rounds to nearest (ties to even) and stores; 8-bit formats saturate.
inline void encode(Format format, void* data, std::int64_t index, double value) {
  if (format == Format::f32) {
    static_cast<float*>(data)[index] = static_cast<float>(value);
  } else if (format == Format::f64) {
    static_cast<double*>(data)[index] = value;
  } else {
    encode_narrow(format, data, index, value);
  }
}
/// The value after encode() and decode().
double rounded(Format format, double value);

}  // namespace flashcore::verify
