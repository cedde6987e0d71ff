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

/// The largest argument of capped_polynomial(): |x| <= 0.6.
inline constexpr float kPolynomialUpTo = static_cast<float>(2.0 * kLog2E * 0.6);

/// c·tanh(x) of an argument 2·log2(e)·x up to kPolynomialUpTo: an odd polynomial on the FMA pipe,
/// with an absolute error below 2^-23 c. The coefficients are a minimax fit of tanh(x) for
/// |x| <= 0.6, in units of the argument.
FLASHCORE_HD float capped_polynomial(float argument, float cap) {
  const float square = argument * argument;
  float factor = 1.0803920531543554e-06f;
  factor = factor * square - 3.104782081209123e-05f;
  factor = factor * square + 0.0006649716524407268f;
  factor = factor * square - 0.01387514267116785f;
  factor = factor * square + 0.34657347202301025f;
  return argument * cap * factor;
}

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
