// Number formats and length verdicts of the verifier. The mutants test the rest.
#include <gtest/gtest.h>

#include <cmath>

#include "verify/inputs/format.h"
#include "verify/inputs/lengths.h"

namespace flashcore::verify {
namespace {

TEST(VerifyFormat, EveryFinite8BitValueSurvivesRounding) {
  for (const Format format : {Format::e4m3, Format::int8, Format::byte8}) {
    for (int encoding = 0; encoding < 256; ++encoding) {
      const auto byte = static_cast<std::uint8_t>(encoding);
      const double value = decode(format, &byte, 0);
      // The most negative integer can be decoded but is never produced.
      const bool most_negative =
          (format == Format::int8 && encoding == 128) || (format == Format::byte8 && encoding == 0);
      if (std::isnan(value) || most_negative) continue;
      EXPECT_EQ(rounded(format, value), value) << to_string(format) << " encoding " << encoding;
    }
  }
}

TEST(VerifyFormat, E4m3RoundsToEvenAndSaturates) {
  EXPECT_EQ(rounded(Format::e4m3, 17), 16);    // halfway between 16 and 18
  EXPECT_EQ(rounded(Format::e4m3, 19), 20);    // halfway between 18 and 20
  EXPECT_EQ(rounded(Format::e4m3, 1e9), 448);  // e4m3 has no infinity
  EXPECT_EQ(rounded(Format::e4m3, -0x1p-9), -0x1p-9);
  EXPECT_EQ(rounded(Format::e4m3, 0x1p-11), 0);
  EXPECT_TRUE(std::isnan(rounded(Format::e4m3, std::nan(""))));
}

LengthVerdict verdict_of(bool (*passes)(std::int64_t)) {
  LengthResults results;
  for (const std::int64_t n : lengths_to_try(false, 1)) results[n] = passes(n);
  return judge_lengths(results, "kv_len");
}

TEST(VerifyLengths, NameTheTile) {
  const LengthVerdict v = verdict_of([](std::int64_t n) { return n % 48 == 0; });
  EXPECT_TRUE(v.failed && v.depends_on_length);
  EXPECT_EQ(v.text, "fails unless kv_len is a multiple of 48");
}

TEST(VerifyLengths, FailuresFromALengthOnDoNotDependOnTheRemainder) {
  const LengthVerdict v = verdict_of([](std::int64_t n) { return n < 52; });
  EXPECT_TRUE(v.failed);
  EXPECT_FALSE(v.depends_on_length);
  EXPECT_EQ(v.first, 52);
}

TEST(VerifyLengths, NoFailureIsAPass) {
  EXPECT_FALSE(verdict_of([](std::int64_t) { return true; }).failed);
}

}  // namespace
}  // namespace flashcore::verify
