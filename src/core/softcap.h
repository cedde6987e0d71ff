// Softcap: a score s becomes c·tanh(s/c).
#pragma once

#include "core/numeric.h"
#include "core/softmax.h"

namespace flashcore::core {

/// The largest cap of the short formula. Its error is that of a score as large as the cap.
inline constexpr double kLargestShortCap = 256;

/// The factor that turns Q K^T into the argument of capped(), 2·log2(e)·s/c.
constexpr double softcap_argument(double scale, double softcap) {
  return 2.0 * kLog2E * scale / softcap;
}

/// c·tanh(x) of an argument 2·log2(e)·x, for c <= kLargestShortCap.
template <typename T>
FLASHCORE_HD T capped_short(T argument, T cap) {
  return cap * (T(1) - T(2) / (T(1) + exp2_scalar(argument)));
}

/// c·tanh(x) as an odd polynomial of the argument, on the FMA pipe: a minimax fit up to
/// |argument| = up_to, with an absolute error below 2^-23 c.
template <int kTerms>
struct CapPolynomial {
  float up_to;
  float coefficients[kTerms];

  /// The polynomial of argument / scale, times cap. Its up_to is negative if powers of the scale or
  /// of arguments could leave f32.
  FLASHCORE_HD constexpr CapPolynomial scaled(double cap, double scale) const {
    CapPolynomial to = *this;
    double factor = cap * scale;
    for (float& x : to.coefficients) {
      x = static_cast<float>(x * factor);
      factor *= scale * scale;
    }
    to.up_to = scale > 1e-6 && scale < 1e6 ? static_cast<float>(up_to / scale) : -1.f;
    return to;
  }
  FLASHCORE_HD constexpr float factor(float x) const {
    const float square = x * x;
    float sum = coefficients[kTerms - 1];
    for (int i = kTerms - 2; i >= 0; --i) sum = sum * square + coefficients[i];
    return sum;
  }
  FLASHCORE_HD constexpr float operator()(float x) const { return x * factor(x); }
};
inline constexpr float kCapArgument = static_cast<float>(2.0 * kLog2E);  // argument of x = 1
inline constexpr CapPolynomial<2> kShortestCapPolynomial{
    0.1f * kCapArgument, {0.34657215523800188f, -0.013806954619806315f}};
inline constexpr CapPolynomial<3> kShortCapPolynomial{
    0.25f * kCapArgument, {0.34657311650916872f, -0.01386868739833586f, 0.0006381223660962555f}};
inline constexpr CapPolynomial<5> kCapPolynomial{
    0.6f * kCapArgument,
    {0.34657346114960513f, -0.013875142675663884f, 0.00066497172162069819f,
     -3.1047842844987606e-05f, 1.0803956451833278e-06f}};

/// The same for any cap. 1 - 2 / (1 + 2^a) cancels for a small x, and a large cap magnifies the
/// error. The power series of tanh replaces it there.
template <typename T>
FLASHCORE_HD T capped(T argument, T cap) {
  constexpr T kSeriesUpTo = sizeof(T) == 4 ? T(0.5) : T(0.1);
  const T x = argument * static_cast<T>(kLn2 / 2);
  if (!(cap > T(kLargestShortCap) && x < kSeriesUpTo && x > -kSeriesUpTo)) {
    return capped_short(argument, cap);
  }
  const T y = x * x;
  T series = T(6404582. / 10854718875.);
  series = series * y - T(929569. / 638512875);
  series = series * y + T(21844. / 6081075);
  series = series * y - T(1382. / 155925);
  series = series * y + T(62. / 2835);
  series = series * y - T(17. / 315);
  series = series * y + T(2. / 15);
  series = series * y - T(1. / 3);
  return cap * (x + x * (y * series));
}

}  // namespace flashcore::core
