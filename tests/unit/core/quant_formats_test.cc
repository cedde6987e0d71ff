// The 8-bit formats of core/quant_formats.h against their definitions: every code, and every value
// near which a code changes.
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

/// The value of a code in steps, by the definition of its format; NaN and infinities as such.
double value_of(Element format, int code) {
  if (format == Element::int8) return code < 128 ? code : code - 256;
  if (format == Element::u8) return code - 128;
  const bool wide = format == Element::e5m2;
  const int mantissa_bits = wide ? 2 : 3, bias = wide ? 15 : 7;
  const int exponent = (code & 0x7f) >> mantissa_bits;
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const double sign = code >= 128 ? -1 : 1;
  if (wide && exponent == 31) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  if (!wide && (code & 0x7f) == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  const int one = exponent == 0 ? 0 : 1 << mantissa_bits;
  return sign * std::ldexp(one + mantissa, std::max(exponent, 1) - bias - mantissa_bits);
}

/// Codes that may be produced, by ascending value; of the two zeros the positive one.
std::vector<int> producible(Element format) {
  std::vector<int> codes;
  for (int code = 0; code < 256; ++code) {
    const double value = value_of(format, code);
    const bool integer = format == Element::int8 || format == Element::u8;
    if (!std::isfinite(value) || (integer && value == -128)) continue;
    if (!integer && code == 0x80) continue;
    codes.push_back(code);
  }
  std::sort(codes.begin(), codes.end(),
            [&](int a, int b) { return value_of(format, a) < value_of(format, b); });
  return codes;
}

float next(float x, bool up) {
  const float infinity = std::numeric_limits<float>::infinity();
  return std::nextafter(x, up ? infinity : -infinity);
}

TEST(EightBit, EveryCodeMeansWhatItsFormatSays) {
  for (const Element format : kFormats) {
    for (int code = 0; code < 256; ++code) {
      const double want = value_of(format, code);
      const double got = decode(format, static_cast<std::uint8_t>(code));
      EXPECT_TRUE(std::isnan(want) ? std::isnan(got) : got == want)
          << static_cast<int>(format) << " code " << code;
      EXPECT_EQ(std::signbit(got), std::signbit(want)) << code;
    }
  }
}

TEST(EightBit, TablesAreMadeByTheCompiler) {
  static constexpr CodeTable kTable = code_table(Element::e4m3);
  static_assert(kTable.value[0x7e] == 448.f && kTable.value[0x01] == 0x1p-9f);
  static_assert(decode(Element::e5m2, 0x7b) == 57344.f);
}

TEST(EightBit, EveryFiniteCodeComesBack) {
  for (const Element format : kFormats) {
    for (int code = 0; code < 256; ++code) {
      const double value = value_of(format, code);
      if (!std::isfinite(value)) continue;
      const Code back = encode(format, static_cast<float>(value));
      const bool never_produced = !has_nan(format) && value == -128;
      EXPECT_EQ(back.saturated, never_produced);
      if (never_produced) continue;
      EXPECT_EQ(back.bits, code) << static_cast<int>(format);
    }
  }
}

/// Half-way between two neighbours, and one float below and above: nearest, ties to the even code.
TEST(EightBit, RoundsToNearestTiesToEven) {
  for (const Element format : kFormats) {
    const std::vector<int> codes = producible(format);
    for (std::size_t i = 0; i + 1 < codes.size(); ++i) {
      const double low = value_of(format, codes[i]), high = value_of(format, codes[i + 1]);
      const auto middle = static_cast<float>((low + high) / 2);  // exact: few bits
      ASSERT_EQ(static_cast<double>(middle), (low + high) / 2);
      const auto value_at = [&](float x) {
        const Code code = encode(format, x);
        EXPECT_FALSE(code.saturated);
        return value_of(format, code.bits);
      };
      // Codes of neighbours differ by one, so one of them is even (as integers, for int8 too).
      const bool low_is_even = codes[i] % 2 == 0;
      EXPECT_EQ(value_at(middle), low_is_even ? low : high) << static_cast<int>(format) << " " << i;
      EXPECT_EQ(value_at(next(middle, false)), low);
      EXPECT_EQ(value_at(next(middle, true)), high);
    }
  }
}

TEST(EightBit, SaturatesAndSaysSo) {
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

TEST(EightBit, NanStaysWhereItCan) {
  for (const Element format : kFormats) {
    const Code code = encode(format, std::numeric_limits<float>::quiet_NaN());
    EXPECT_FALSE(code.saturated);
    const double value = value_of(format, code.bits);
    EXPECT_TRUE(has_nan(format) ? std::isnan(value) : value == 0);
  }
}

TEST(EightBit, ScalesHaveReciprocals) {
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
