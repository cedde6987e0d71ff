// The exponentials of the CPU kernels, for each instruction set this machine can execute.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/numeric.h"
#include "cpu/cpu_info.h"
#include "support/call.h"
#include "unit/cpu/exp2_probe.h"
#include "verify/inputs/random.h"

namespace flashcore::test {
namespace {

constexpr int kBlock = 1024;

struct Named {
  Isa isa;
  const Exp2Probe* probe;
};

const Named kProbes[] = {
    {Isa::generic, &kExp2Generic},
#if defined(__aarch64__)
    {Isa::neon, &kExp2Neon},
#elif defined(__x86_64__)
    {Isa::avx2, &kExp2Avx2},       {Isa::avx512, &kExp2Avx512},
    {Isa::vnni, &kExp2Vnni},       {Isa::amx, &kExp2Amx},
#endif
};

class Exp2Test : public testing::TestWithParam<Named> {
 protected:
  void SetUp() override {
    if (!cpu::isa_available(GetParam().isa)) {
      GTEST_SKIP() << "this CPU has no " << to_string(GetParam().isa);
    }
  }
  float of(float x) const {
    std::vector<float> in(16, x), out(16);
    GetParam().probe->floats(in.data(), out.data(), 16);
    return out[7];
  }
  double of(double x) const {
    std::vector<double> in(16, x), out(16);
    GetParam().probe->doubles(in.data(), out.data(), 16);
    return out[7];
  }
};
INSTANTIATE_TEST_SUITE_P(Isas, Exp2Test, testing::ValuesIn(kProbes),
                         [](const auto& test) { return std::string(to_string(test.param.isa)); });

TEST_P(Exp2Test, SpecialValuesAreExact) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(of(-inf), 0.0f);
  EXPECT_FALSE(std::signbit(of(-inf)));
  EXPECT_TRUE(std::isnan(of(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_EQ(of(-std::numeric_limits<float>::max()), 0.0f);
  EXPECT_EQ(of(-127.0f), 0.0f);
  EXPECT_EQ(of(-126.0f), 0x1p-126f);
  EXPECT_EQ(of(-0.0f), 1.0f);
  const double dinf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(of(-dinf), 0.0);
  EXPECT_TRUE(std::isnan(of(std::numeric_limits<double>::quiet_NaN())));
  EXPECT_EQ(of(-std::numeric_limits<double>::max()), 0.0);
  EXPECT_EQ(of(-1023.0), 0.0);
  EXPECT_EQ(of(-1022.0), 0x1p-1022);
}

TEST_P(Exp2Test, PowersOfTwoAreExact) {
  // A rescale by 2^0 must be exactly 1, or a merge with an empty partial result would change bits.
  for (int n = -126; n <= 100; ++n) {
    ASSERT_EQ(of(static_cast<float>(n)), std::ldexp(1.0f, n)) << n;
  }
  for (int n = -1022; n <= 100; ++n) {
    ASSERT_EQ(of(static_cast<double>(n)), std::ldexp(1.0, n)) << n;
  }
}

TEST_P(Exp2Test, FloatErrorIsAtMost1Point25Ulp) {
  double worst = 0;
  std::vector<float> x(kBlock), y(kBlock);
  // Magnitudes from 2^-30 to 126 with a prime stride of bit patterns: all of [-126, 0] whose exp2
  // is not 1 after rounding. Values up to +100 are for the softcap.
  const std::uint32_t first = core::bits_of_float(0x1p-30f), last = core::bits_of_float(126.0f);
  std::uint32_t bits = first;
  const auto step = static_cast<std::uint32_t>(211 * FLASHCORE_TEST_DIVISOR);
  while (bits < last) {
    for (float& value : x) {
      const float magnitude = core::float_of_bits(std::min(bits, last));
      value = (bits & 1u) != 0 && magnitude <= 100.0f ? magnitude : -magnitude;
      bits += step;
    }
    GetParam().probe->floats(x.data(), y.data(), kBlock);
    for (int i = 0; i < kBlock; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const double want = std::exp2(static_cast<double>(x[at]));
      worst = std::max(worst, std::fabs(y[at] - want) / want);
    }
  }
  EXPECT_LE(worst, 1.25 * 0x1p-23);
  EXPECT_GT(worst, 0x1p-26);  // 0 would mean that exp2 is compared with itself
}

TEST_P(Exp2Test, DoubleErrorIsAtMost1Point25Ulp) {
  double worst = 0;
  verify::Random random(9);
  std::vector<double> x(kBlock), y(kBlock);
  for (int n = 0; n < rounds(300); ++n) {
    const double scale = std::exp2(12 * random.uniform() - 2);
    for (double& value : x) value = std::clamp(-scale * random.uniform(), -1022.0, 100.0);
    GetParam().probe->doubles(x.data(), y.data(), kBlock);
    for (std::size_t i = 0; i < kBlock; ++i) {
      // long double, so that the error of the reference does not count.
      const long double want = std::exp2(static_cast<long double>(x[i]));
      worst = std::max(worst, static_cast<double>(std::fabs((y[i] - want) / want)));
    }
  }
  EXPECT_LE(worst, 1.25 * 0x1p-52);
  EXPECT_GT(worst, 0x1p-56);
}

TEST_P(Exp2Test, NaturalSpecialValuesAreExact) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  // The last two are the neighbours of the logarithm of 2^-126, the smallest normal result.
  const std::vector<float> x = {
      -inf, -std::numeric_limits<float>::max(), nan, 0, -0.0f, -87.336548f, -87.33654f};
  std::vector<float> in(16, 0.0f), out(16);
  std::copy(x.begin(), x.end(), in.begin());
  GetParam().probe->natural_floats(in.data(), out.data(), 16);
  EXPECT_EQ(out[0], 0);
  EXPECT_EQ(out[1], 0);
  EXPECT_TRUE(std::isnan(out[2]));
  EXPECT_EQ(out[3], 1);  // a rescale to the same maximum changes no bit
  EXPECT_EQ(out[4], 1);
  EXPECT_EQ(out[5], 0);
  EXPECT_NEAR(out[6] / 0x1p-126f, 1, 2e-5);
  const double dinf = std::numeric_limits<double>::infinity();
  std::vector<double> din(16, 0.0), dout(16);
  din[0] = -dinf, din[1] = std::nan(""), din[2] = -708.3965, din[3] = -708.3964;
  GetParam().probe->natural_doubles(din.data(), dout.data(), 16);
  EXPECT_EQ(dout[0], 0);
  EXPECT_TRUE(std::isnan(dout[1]));
  EXPECT_EQ(dout[2], 0);
  EXPECT_GT(dout[3], 0x1p-1022);
  EXPECT_EQ(dout[4], 1);
}

// Beside the error of exp2 there is that of log2(e) in the type, and without FMA a rounding of the
// product.
TEST_P(Exp2Test, NaturalErrorsAreThoseOfTheArgument) {
  const bool fuses = GetParam().isa != Isa::generic;
  verify::Random random(10);
  std::vector<float> x(kBlock), y(kBlock);
  std::vector<double> dx(kBlock), dy(kBlock);
  double worst = 0, double_worst = 0;  // as a share of the bound
  for (int n = 0; n < rounds(300); ++n) {
    const double scale = std::exp2(9 * random.uniform() - 3);
    for (std::size_t i = 0; i < kBlock; ++i) {
      dx[i] = std::clamp(-scale * random.uniform(), -87.0, 69.0);
      x[i] = static_cast<float>(dx[i]);
    }
    GetParam().probe->natural_floats(x.data(), y.data(), kBlock);
    GetParam().probe->natural_doubles(dx.data(), dy.data(), kBlock);
    for (std::size_t i = 0; i < kBlock; ++i) {
      const double want = std::exp(static_cast<double>(x[i]));
      const double share = 1.4e-8 + (fuses ? 0 : 0x1p-24);
      worst = std::max(worst, std::fabs(y[i] - want) / want / (1.25 * 0x1p-23 - share * x[i]));
      const long double exact = std::exp(static_cast<long double>(dx[i]));
      const double double_share = 0x1p-54 + (fuses ? 0 : 0x1p-53);
      double_worst =
          std::max(double_worst, static_cast<double>(std::fabs((dy[i] - exact) / exact)) /
                                     (1.25 * 0x1p-52 - double_share * dx[i]));
    }
  }
  EXPECT_LE(worst, 1);
  EXPECT_GT(worst, 0.1);
  EXPECT_LE(double_worst, 1);
  EXPECT_GT(double_worst, 0.1);
}

TEST_P(Exp2Test, IsStrictlyIncreasing) {
  // The kernels do not need strict monotonicity, but it exposes a jump between two intervals of the
  // polynomial.
  std::vector<float> x(kBlock), y(kBlock);
  for (int interval = -20; interval < 0; ++interval) {
    const float first = static_cast<float>(interval) + 0.5f - 0x1p-13f * kBlock;
    for (std::size_t i = 0; i < kBlock; ++i) {
      x[i] = first + static_cast<float>(i) * 0x1p-12f;
    }
    GetParam().probe->floats(x.data(), y.data(), kBlock);
    for (std::size_t i = 1; i < kBlock; ++i) ASSERT_LT(y[i - 1], y[i]) << x[i];
  }
}

}  // namespace
}  // namespace flashcore::test
