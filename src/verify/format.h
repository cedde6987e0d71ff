// Number formats an implementation under test may take, among them 8-bit ones the library's own
// tensors do not have. A value of an 8-bit format is decode(code) * scale.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "flashcore/verify_c.h"

namespace flashcore::verify {

enum class Format : std::int32_t { f64, f32, f16, bf16, e4m3, int8, byte8 };

const char* to_string(Format format);
std::optional<Format> format_named(std::string_view name);
flashcore_dtype c_dtype(Format format);

constexpr bool is_8bit(Format format) { return format >= Format::e4m3; }
constexpr std::int64_t size_of(Format format) {
  return format == Format::f64 ? 8 : format == Format::f32 ? 4 : is_8bit(format) ? 1 : 2;
}

/// Unit roundoff; of f64 twice that, because the oracle rounds too. int8 and the byte format are
/// fixed point: half a step at their largest value.
double unit_of(Format format);
/// Spacing at 0, below which values are flushed.
double smallest_of(Format format);

double decode(Format format, const void* data, std::int64_t index);
/// Rounds to nearest (ties to even) and stores; 8-bit formats saturate.
void encode(Format format, void* data, std::int64_t index, double value);
/// What encode() leaves of a value.
double rounded(Format format, double value);

}  // namespace flashcore::verify
