#include "verify/inputs/format.h"

#include <array>

#include "core/numeric.h"
#include "reference/oracle.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::verify {
namespace {

struct Named {
  Format format;
  const char* name;
};
constexpr Named kNames[] = {{Format::f64, "f64"},   {Format::f32, "f32"},   {Format::f16, "f16"},
                            {Format::bf16, "bf16"}, {Format::e4m3, "e4m3"}, {Format::e5m2, "e5m2"},
                            {Format::int8, "int8"}, {Format::byte8, "byte"}};
/// Names of the formats in NumPy and torch, accepted as aliases.
constexpr Named kAliases[] = {{Format::f64, "float64"},        {Format::f32, "float32"},
                              {Format::f16, "float16"},        {Format::bf16, "bfloat16"},
                              {Format::e4m3, "float8_e4m3fn"}, {Format::e5m2, "float8_e5m2"},
                              {Format::byte8, "uint8"}};

DType dtype_of(Format format) {
  switch (format) {
    case Format::f64: return DType::f64;
    case Format::f32: return DType::f32;
    case Format::f16: return DType::f16;
    case Format::bf16: return DType::bf16;
    case Format::e4m3: return DType::e4m3;
    case Format::e5m2: return DType::e5m2;
    case Format::int8: return DType::int8;
    case Format::byte8: return DType::u8;
  }
  return DType::none;
}

using DecodeTable = std::array<double, 256>;
constexpr auto kFirst8Bit = static_cast<std::size_t>(Format::e4m3);
constexpr auto k8BitFormats = static_cast<std::size_t>(Format::byte8) + 1 - kFirst8Bit;

/// Decode table of an 8-bit format, from the oracle.
const DecodeTable& decode_table(Format format) {
  static const auto all = [] {
    std::array<DecodeTable, k8BitFormats> values{};
    for (std::size_t i = 0; i < k8BitFormats; ++i) {
      const DType dtype = dtype_of(static_cast<Format>(kFirst8Bit + i));
      for (std::size_t code = 0; code < 256; ++code) {
        const auto byte = static_cast<std::uint8_t>(code);
        values[i][code] = reference::element(&byte, dtype, 0);
      }
    }
    return values;
  }();
  return all[static_cast<std::size_t>(format) - kFirst8Bit];
}

}  // namespace

const char* to_string(Format format) { return kNames[static_cast<int>(format)].name; }

std::optional<Format> format_named(std::string_view name) {
  for (const Named& n : kNames) {
    if (name == n.name) return n.format;
  }
  for (const Named& n : kAliases) {
    if (name == n.name) return n.format;
  }
  return std::nullopt;
}

flashcore_dtype c_dtype(Format format) {
  const auto bits = static_cast<std::uint8_t>(8 * size_of(format));
  switch (format) {
    case Format::bf16: return {FLASHCORE_BFLOAT, bits, 1};
    case Format::e4m3: return {FLASHCORE_FLOAT8_E4M3, bits, 1};
    case Format::e5m2: return {FLASHCORE_FLOAT8_E5M2, bits, 1};
    case Format::int8: return {FLASHCORE_INT, bits, 1};
    case Format::byte8: return {FLASHCORE_UINT, bits, 1};
    default: return {FLASHCORE_FLOAT, bits, 1};
  }
}

double unit_of(Format format) {
  switch (format) {
    case Format::f64: return 0x1p-52;
    case Format::f32: return 0x1p-24;
    case Format::f16: return 0x1p-11;
    case Format::bf16: return 0x1p-8;
    case Format::e4m3: return 0x1p-4;
    case Format::e5m2: return 0x1p-3;
    default: return 0.5 / 127;
  }
}

double smallest_of(Format format) {
  switch (format) {
    case Format::f64: return 0x1p-1022;
    case Format::f16: return 0x1p-24;
    case Format::e4m3: return 0x1p-9;
    case Format::e5m2: return 0x1p-16;
    case Format::int8:
    case Format::byte8: return 1.0 / 127;
    default: return 0x1p-126;  // f32 and bf16 arithmetic may flush subnormals
  }
}

double decode_byte(Format format, std::uint8_t code) { return decode_narrow(format, &code, 0); }

double decode_narrow(Format format, const void* data, std::int64_t index) {
  switch (format) {
    case Format::f16: return core::float_of_f16(static_cast<const std::uint16_t*>(data)[index]);
    case Format::bf16: return core::float_of_bf16(static_cast<const std::uint16_t*>(data)[index]);
    default: return decode_table(format)[static_cast<const std::uint8_t*>(data)[index]];
  }
}

void encode_narrow(Format format, void* data, std::int64_t index, double value) {
  if (is_8bit(format)) {
    static_cast<std::uint8_t*>(data)[index] = encode(dtype_of(format), value);
  } else {
    store(data, dtype_of(format), index, value);
  }
}

double rounded(Format format, double value) {
  double bytes = 0;
  encode(format, &bytes, 0, value);
  return decode(format, &bytes, 0);
}

}  // namespace flashcore::verify
