// The 8-bit formats of core/quant_formats.h against their definitions: every bit pattern, and every
// rounding boundary between two of them.
#include "core/quant_formats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace flashcore::core {
namespace {

constexpr Element kFormats[] = {Element::e4m3, Element::e5m2, Element::int8, Element::u8};

/// The value of a bit pattern by the definition of its format, before the scale.
double value_of(Element format, int bits) {
  if (format == Element::int8) return bits < 128 ? bits : bits - 256;
  if (format == Element::u8) return bits - 128;
  const bool wide = format == Element::e5m2;
  const int mantissa_bits = wide ? 2 : 3, bias = wide ? 15 : 7;
  const int exponent = (bits & 0x7f) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits >= 128 ? -1 : 1;
  if (wide && exponent == 31) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  if (!wide && (bits & 0x7f) == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  const int one = exponent == 0 ? 0 : 1 << mantissa_bits;
  return sign * std::ldexp(one + mantissa, std::max(exponent, 1) - bias - mantissa_bits);
}

/// The bit patterns that encode() may return, by ascending value. Of the two zeros only +0.
std::vector<int> encodable(Element format) {
  std::vector<int> patterns;
  for (int bits = 0; bits < 256; ++bits) {
    const double value = value_of(format, bits);
    const bool integer = format == Element::int8 || format == Element::u8;
    if (!std::isfinite(value) || (integer && value == -128)) continue;
    if (!integer && bits == 0x80) continue;
    patterns.push_back(bits);
  }
  std::sort(patterns.begin(), patterns.end(),
            [&](int a, int b) { return value_of(format, a) < value_of(format, b); });
  return patterns;
}

float next(float x, bool up) {
  const float infinity = std::numeric_limits<float>::infinity();
  return std::nextafter(x, up ? infinity : -infinity);
}

TEST(QuantFormats, DecodeMatchesTheDefinition) {
  for (const Element format : kFormats) {
    for (int bits = 0; bits < 256; ++bits) {
      const double want = value_of(format, bits);
      const double got = decode(format, static_cast<std::uint8_t>(bits));
      EXPECT_TRUE(std::isnan(want) ? std::isnan(got) : got == want)
          << static_cast<int>(format) << " bits " << bits;
      EXPECT_EQ(std::signbit(got), std::signbit(want)) << bits;
    }
  }
}

TEST(QuantFormats, TablesAreConstexpr) {
  static constexpr DecodeTable kTable = decode_table(Element::e4m3);
  static_assert(kTable.value[0x7e] == 448.f && kTable.value[0x01] == 0x1p-9f);
  static_assert(decode(Element::e5m2, 0x7b) == 57344.f);
}

TEST(QuantFormats, EveryFiniteValueRoundTrips) {
  for (const Element format : kFormats) {
    for (int bits = 0; bits < 256; ++bits) {
      const double value = value_of(format, bits);
      if (!std::isfinite(value)) continue;
      const Code back = encode(format, static_cast<float>(value));
      const bool never_encoded = !has_nan(format) && value == -128;
      EXPECT_EQ(back.saturated, never_encoded);
      if (never_encoded) continue;
      EXPECT_EQ(back.bits, bits) << static_cast<int>(format);
    }
  }
}

/// Tests the midpoint of two neighbors and the floats next to it: nearest, ties to the even
/// pattern.
TEST(QuantFormats, RoundsToNearestTiesToEven) {
  for (const Element format : kFormats) {
    const std::vector<int> patterns = encodable(format);
    for (std::size_t i = 0; i + 1 < patterns.size(); ++i) {
      const double low = value_of(format, patterns[i]), high = value_of(format, patterns[i + 1]);
      const auto middle = static_cast<float>((low + high) / 2);  // exact: few bits
      ASSERT_EQ(static_cast<double>(middle), (low + high) / 2);
      const auto value_at = [&](float x) {
        const Code code = encode(format, x);
        EXPECT_FALSE(code.saturated);
        return value_of(format, code.bits);
      };
      // The bit patterns of neighbors differ by one, so one of them is even, for int8 too.
      const bool low_is_even = patterns[i] % 2 == 0;
      EXPECT_EQ(value_at(middle), low_is_even ? low : high) << static_cast<int>(format) << " " << i;
      EXPECT_EQ(value_at(next(middle, false)), low);
      EXPECT_EQ(value_at(next(middle, true)), high);
    }
  }
}

TEST(QuantFormats, SaturatesAndReportsIt) {
  const struct {
    Element format;
    float last_inside, largest;
  } edges[] = {{Element::e4m3, 464.f, 448.f},  // ties to 448, whose mantissa is even
               {Element::e5m2, next(61440.f, false), 57344.f},
               {Element::int8, next(127.5f, false), 127.f},
               {Element::u8, next(127.5f, false), 127.f}};
  for (const auto& edge : edges) {
    EXPECT_EQ(largest_decoded(edge.format), edge.largest);
    for (const float sign : {1.f, -1.f}) {
      const Code inside = encode(edge.format, sign * edge.last_inside);
      EXPECT_FALSE(inside.saturated);
      EXPECT_EQ(value_of(edge.format, inside.bits), sign * edge.largest);
      for (const float beyond :
           {next(edge.last_inside, true), 1e30f, std::numeric_limits<float>::infinity()}) {
        const Code code = encode(edge.format, sign * beyond);
        EXPECT_TRUE(code.saturated) << beyond;
        EXPECT_EQ(value_of(edge.format, code.bits), sign * edge.largest);
      }
    }
  }
}

TEST(QuantFormats, NanIsNanOrZero) {
  for (const Element format : kFormats) {
    const Code code = encode(format, std::numeric_limits<float>::quiet_NaN());
    EXPECT_FALSE(code.saturated);
    const double value = value_of(format, code.bits);
    EXPECT_TRUE(has_nan(format) ? std::isnan(value) : value == 0);
  }
}

TEST(QuantFormats, ScalesHaveFiniteReciprocals) {
  for (const Element format : kFormats) {
    EXPECT_EQ(scale_of_largest(format, 0.f), 1.f);
    for (const float largest : {0x1p-149f, 1e-40f, 1e-20f, 1.f, 3e38f}) {
      const float scale = scale_of_largest(format, largest);
      EXPECT_TRUE(std::isfinite(1.f / scale) && scale > 0) << largest;
      EXPECT_TRUE(std::isfinite(inverse_step(format, scale)));
      EXPECT_FALSE(encode(format, largest * inverse_step(format, scale)).saturated) << largest;
    }
  }
}

}  // namespace
}  // namespace flashcore::core
