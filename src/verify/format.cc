#include "verify/format.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "core/numeric.h"

namespace flashcore::verify {
namespace {

struct Named {
  Format format;
  const char* name;
};
constexpr Named kNames[] = {{Format::f64, "f64"},   {Format::f32, "f32"},   {Format::f16, "f16"},
                            {Format::bf16, "bf16"}, {Format::e4m3, "e4m3"}, {Format::int8, "int8"},
                            {Format::byte8, "byte"}};
/// Other names the same formats go by, in NumPy and torch.
constexpr Named kAliases[] = {{Format::f64, "float64"},        {Format::f32, "float32"},
                              {Format::f16, "float16"},        {Format::bf16, "bfloat16"},
                              {Format::e4m3, "float8_e4m3fn"}, {Format::byte8, "uint8"}};

constexpr double kByteStep = 448.0 / 127.0;

/// Sign, four exponent bits (bias 7), three mantissa bits; 0x7f and 0xff are NaN, nothing is inf.
double e4m3_value(std::uint8_t code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  const double sign = (code & 0x80) != 0 ? -1.0 : 1.0;
  if (exponent == 15 && mantissa == 7) return std::nan("");
  if (exponent == 0) return sign * std::ldexp(mantissa, -9);
  return sign * std::ldexp(8 + mantissa, exponent - 10);
}

const std::array<double, 256>& e4m3_values() {
  static const std::array<double, 256> values = [] {
    std::array<double, 256> all{};
    for (int code = 0; code < 256; ++code) {
      all[static_cast<std::size_t>(code)] = e4m3_value(static_cast<std::uint8_t>(code));
    }
    return all;
  }();
  return values;
}

std::uint8_t e4m3_code(double value) {
  if (std::isnan(value)) return 0x7f;
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const double size = std::min(std::fabs(value), 448.0);
  const auto exponent_of = [](double x) {  // of a normal number
    return static_cast<int>(std::bit_cast<std::uint64_t>(x) >> 52) - 1023;
  };
  const int exponent = size < 0x1p-6 ? -6 : exponent_of(size);
  // In units of the last place; nearbyint() rounds ties to even.
  const auto unit = std::bit_cast<double>(static_cast<std::uint64_t>(exponent - 3 + 1023) << 52);
  auto units = static_cast<int>(std::nearbyint(size / unit));
  int biased = exponent + 7;
  if (units == 16) {
    units = 8;
    ++biased;
  }
  if (units < 8) return static_cast<std::uint8_t>(sign | units);  // subnormal
  return static_cast<std::uint8_t>(sign | (biased << 3) | (units - 8));
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
    default: return 0.5 / 127;
  }
}

double smallest_of(Format format) {
  switch (format) {
    case Format::f64: return 0x1p-1022;
    case Format::f16: return 0x1p-24;
    case Format::e4m3: return 0x1p-9;
    case Format::int8:
    case Format::byte8: return 1.0 / 127;
    default: return 0x1p-126;  // f32 and bf16 arithmetic may flush subnormals
  }
}

double value_of_code(Format format, std::uint8_t code) { return decode_narrow(format, &code, 0); }

double decode_narrow(Format format, const void* data, std::int64_t index) {
  switch (format) {
    case Format::e4m3: return e4m3_values()[static_cast<const std::uint8_t*>(data)[index]];
    case Format::int8: return static_cast<const std::int8_t*>(data)[index];
    case Format::byte8: return (static_cast<const std::uint8_t*>(data)[index] - 128) * kByteStep;
    case Format::f16: return core::float_of_f16(static_cast<const std::uint16_t*>(data)[index]);
    default: return core::float_of_bf16(static_cast<const std::uint16_t*>(data)[index]);
  }
}

void encode_narrow(Format format, void* data, std::int64_t index, double value) {
  const auto steps = [](double x) {
    return static_cast<int>(std::clamp(std::nearbyint(x), -127.0, 127.0));
  };
  switch (format) {
    case Format::e4m3: static_cast<std::uint8_t*>(data)[index] = e4m3_code(value); break;
    case Format::int8:
      static_cast<std::int8_t*>(data)[index] = static_cast<std::int8_t>(steps(value));
      break;
    case Format::byte8:
      static_cast<std::uint8_t*>(data)[index] =
          static_cast<std::uint8_t>(128 + steps(value / kByteStep));
      break;
    case Format::f16:
      static_cast<std::uint16_t*>(data)[index] = core::f16_of_float(static_cast<float>(value));
      break;
    default:
      static_cast<std::uint16_t*>(data)[index] = core::bf16_of_float(static_cast<float>(value));
  }
}

double rounded(Format format, double value) {
  double bytes = 0;
  encode(format, &bytes, 0, value);
  return decode(format, &bytes, 0);
}

}  // namespace flashcore::verify
