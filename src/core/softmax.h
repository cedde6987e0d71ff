// The algebra of online softmax, in one place for every backend.
//
// A row's state over the keys seen so far is (max, sum) with sum = Σ exp(s - max). Scores s are in
// natural units: the maximum is subtracted before log2(e) is multiplied in, so scores, biases and
// sinks as large as the type's largest number do not overflow. Two guards keep it free of NaN:
//  - a row that has seen no key has max = -inf; subtracting that from a score of -inf would be
//    NaN, so the value subtracted is 0 instead (softmax_base);
//  - such a row has sum = 0: its output is 0 and its LSE -inf, never 0/0.
// A NaN score leaves max alone and turns sum into NaN, which is how it reaches out and LSE.
#pragma once

#include "core/config.h"
#include "core/numeric.h"

namespace flashcore::core {

template <typename T>
FLASHCORE_HD constexpr T negative_infinity() {
  return -static_cast<T>(__builtin_inff());
}

/// What to subtract from scores before exponentiating.
template <typename T>
FLASHCORE_HD T softmax_base(T max) {
  return max == negative_infinity<T>() ? T(0) : max;
}

template <typename T>
struct SoftmaxState {
  T max;
  T sum;
};

#if defined(__CUDA_ARCH__)
FLASHCORE_HD float exp2_scalar(float x) { return ::exp2f(x); }
FLASHCORE_HD float log2_scalar(float x) { return ::log2f(x); }
#else
FLASHCORE_HD float exp2_scalar(float x) { return __builtin_exp2f(x); }
FLASHCORE_HD float log2_scalar(float x) { return __builtin_log2f(x); }
FLASHCORE_HD double exp2_scalar(double x) { return __builtin_exp2(x); }
FLASHCORE_HD double log2_scalar(double x) { return __builtin_log2(x); }
#endif

/// exp(x).
template <typename T>
FLASHCORE_HD T exp_scalar(T x) {
  return exp2_scalar(x * static_cast<T>(kLog2E));
}

/// Two-level sums: a tile's own sum joins the running one with a single rounding.
template <typename T>
FLASHCORE_HD T add_tile_sum(T running_sum, T rescale, T tile_sum) {
  return running_sum * rescale + tile_sum;
}

/// One more term in the denominator and nothing in the numerator. Returns the factor by which the
/// accumulated output must still be multiplied because the maximum may have grown.
template <typename T>
FLASHCORE_HD T add_sink(SoftmaxState<T>& state, T sink) {
  const T max = sink > state.max ? sink : state.max;
  const T base = softmax_base(max);
  const T rescale = exp_scalar(state.max - base);
  state.sum = state.sum * rescale + exp_scalar(sink - base);
  state.max = max;
  return rescale;
}

/// What the accumulated output is multiplied by in the end: 1 / sum, and 0 for a row without keys.
template <typename T>
FLASHCORE_HD T output_factor(T sum) {
  return sum == T(0) ? T(0) : T(1) / sum;
}

/// What a row has accumulated over keys whose sum is `sum`. Without a key that is P = 0 times
/// whatever V holds, where 0 · NaN is NaN: the row's output is 0.
template <typename T>
FLASHCORE_HD T output_of_keys(T accumulated, T sum) {
  return sum == T(0) ? T(0) : accumulated;
}

/// Natural logarithm of Σ exp(score).
template <typename T>
FLASHCORE_HD T log_sum_exp(const SoftmaxState<T>& state) {
  if (state.sum == T(0)) return negative_infinity<T>();
  return state.max + log2_scalar(state.sum) * static_cast<T>(kLn2);
}

}  // namespace flashcore::core
