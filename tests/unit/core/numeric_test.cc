// The 16-bit conversions of core/numeric.h against the definition of the formats.
#include "core/numeric.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "support/call.h"

namespace flashcore::core {
namespace {

struct Format {
  int exponent_bits, mantissa_bits;
  float (*widen)(std::uint16_t);
  std::uint16_t (*narrow)(float);

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  double largest() const { return std::ldexp(2.0 - std::ldexp(1.0, -mantissa_bits), bias()); }
};

// Lambdas, because always_inline functions have no address.
const Format kF16{5, 10, [](std::uint16_t x) { return float_of_f16(x); },
                  [](float x) { return f16_of_float(x); }};
const Format kBf16{8, 7, [](std::uint16_t x) { return float_of_bf16(x); },
                   [](float x) { return bf16_of_float(x); }};

/// The value of a bit pattern, by the definition of the format.
double value_of(const Format& format, std::uint16_t bits) {
  const int exponent = (bits >> format.mantissa_bits) & ((1 << format.exponent_bits) - 1);
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << format.exponent_bits) - 1) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  const int one = exponent == 0 ? 0 : 1 << format.mantissa_bits;
  return sign *
         std::ldexp(one + mantissa, std::max(exponent, 1) - format.bias() - format.mantissa_bits);
}

/// The nearest value of the format, ties to even. Computed in f64, where every operation is exact.
double rounded(const Format& format, float x) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), 1 - format.bias());
  const double ulp = std::ldexp(1.0, exponent - format.mantissa_bits);
  const double nearest = std::nearbyint(x / ulp) * ulp;
  if (std::fabs(nearest) <= format.largest()) return nearest;
  return std::copysign(std::numeric_limits<double>::infinity(), nearest);
}

/// True if narrow(x) is correctly rounded.
bool converts(const Format& format, float x) {
  const double got = value_of(format, format.narrow(x));
  const double want = rounded(format, x);
  if (std::isnan(x)) return std::isnan(got);
  return got == want && std::signbit(got) == std::signbit(x);
}

class NumericTest : public testing::TestWithParam<const Format*> {};
INSTANTIATE_TEST_SUITE_P(Formats, NumericTest, testing::Values(&kF16, &kBf16),
                         [](const auto& test) {
                           return test.param == &kF16 ? std::string("f16") : std::string("bf16");
                         });

TEST_P(NumericTest, EveryValueRoundTrips) {
  const Format& format = *GetParam();
  for (int bits = 0; bits < 65536; ++bits) {
    const auto narrow = static_cast<std::uint16_t>(bits);
    const double want = value_of(format, narrow);
    const float got = format.widen(narrow);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(got)) << bits;
      ASSERT_TRUE(std::isnan(value_of(format, format.narrow(got)))) << bits;
      continue;
    }
    ASSERT_EQ(static_cast<double>(got), want) << bits;
    ASSERT_EQ(std::signbit(got), std::signbit(want)) << bits;
    ASSERT_EQ(format.narrow(got), narrow) << bits;
  }
}

TEST_P(NumericTest, TiesAndTheirNeighborsRoundToNearestEven) {
  const Format& format = *GetParam();
  int ties = 0;
  for (int bits = 0; bits < 65535; ++bits) {
    const double low = value_of(format, static_cast<std::uint16_t>(bits));
    const double high = value_of(format, static_cast<std::uint16_t>(bits + 1));
    if (!std::isfinite(low) || !std::isfinite(high)) continue;
    const auto tie = static_cast<float>((low + high) / 2);
    if (static_cast<double>(tie) != (low + high) / 2) continue;  // below bf16's subnormals
    ++ties;
    const float infinity = std::numeric_limits<float>::infinity();
    for (const float x : {std::nextafter(tie, -infinity), tie, std::nextafter(tie, infinity)}) {
      ASSERT_TRUE(converts(format, x)) << std::hexfloat << x;
    }
  }
  EXPECT_GT(ties, 60000);
}

TEST_P(NumericTest, PatternsFromTheWholeRangeRoundToNearestEven) {
  const Format& format = *GetParam();
  // A prime stride over all 2^32 patterns covers every exponent, subnormals, infinities and NaN.
  const std::uint64_t stride = 1009 * FLASHCORE_TEST_DIVISOR;
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += stride) {
    const float x = float_of_bits(static_cast<std::uint32_t>(bits));
    ASSERT_TRUE(converts(format, x)) << std::hex << bits;
  }
}

TEST_P(NumericTest, OverflowStartsHalfAnUlpPastTheLargest) {
  const Format& format = *GetParam();
  const double half_ulp = std::ldexp(1.0, format.bias() - format.mantissa_bits - 1);
  const auto edge = static_cast<float>(format.largest() + half_ulp);
  EXPECT_EQ(value_of(format, format.narrow(std::nextafter(edge, 0.0f))), format.largest());
  EXPECT_TRUE(std::isinf(value_of(format, format.narrow(edge))));
  EXPECT_TRUE(std::isinf(value_of(format, format.narrow(-edge))));
  EXPECT_LT(value_of(format, format.narrow(-edge)), 0);
}

TEST(Numeric, KnownValuesConvert) {
  EXPECT_EQ(f16_of_float(1.0f), 0x3c00);
  EXPECT_EQ(f16_of_float(-2.0f), 0xc000);
  EXPECT_EQ(f16_of_float(65504.0f), 0x7bff);
  EXPECT_EQ(f16_of_float(65519.996f), 0x7bff);
  EXPECT_EQ(f16_of_float(65520.0f), 0x7c00);
  EXPECT_EQ(f16_of_float(0x1p-24f), 0x0001);
  EXPECT_EQ(f16_of_float(0x1p-25f), 0x0000);  // a tie with 0, which is even
  EXPECT_EQ(f16_of_float(0x1.000002p-25f), 0x0001);
  EXPECT_EQ(f16_of_float(-0.0f), 0x8000);
  EXPECT_EQ(bf16_of_float(1.0f), 0x3f80);
  EXPECT_EQ(bf16_of_float(1.00390625f), 0x3f80);  // 1 + 2^-8: a tie, down to even
  EXPECT_EQ(bf16_of_float(1.01171875f), 0x3f82);  // 1 + 3 * 2^-8: a tie, up to even
  EXPECT_EQ(bf16_of_float(std::numeric_limits<float>::max()), 0x7f80);
}

}  // namespace
}  // namespace flashcore::core
