// The algebra of online softmax, shared by every backend.
//
// A row's state over the keys read so far is (max, sum) with sum = Σ exp(s - max). Scores s are in
// natural units: max is subtracted before the multiplication by log2(e), so that scores, biases and
// sinks up to the largest number of the type do not overflow. Two guards prevent NaN:
//  - A row without visible keys has max = -inf. softmax_base() then returns 0, because -inf minus
//    -inf is NaN.
//  - Such a row has sum = 0. Its output is 0 and its LSE is -inf, never 0/0.
// A NaN score does not change max but turns sum into NaN, and so reaches out and LSE.
#pragma once

#include "core/config.h"
#include "core/fault.h"
#include "core/numeric.h"

namespace flashcore::core {

template <typename T>
FLASHCORE_HD constexpr T negative_infinity() {
  return -static_cast<T>(__builtin_inff());
}

/// The number that scores are reduced by before exp().
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

/// Adds a tile's sum to the running sum with one rounding.
template <typename T>
FLASHCORE_HD T add_tile_sum(T running_sum, T rescale, T tile_sum) {
  return running_sum * rescale + tile_sum;
}

/// Adds exp(sink) to the denominator. Returns the factor that rescales the accumulated output,
/// because max may grow.
template <typename T>
FLASHCORE_HD T add_sink(SoftmaxState<T>& state, T sink) {
  const T max = sink > state.max ? sink : state.max;
  const T base = softmax_base(max);
  const T rescale = exp_scalar(state.max - base);
  state.sum = state.sum * rescale + exp_scalar(sink - base);
  state.max = max;
  return rescale;
}

/// The final factor of the accumulated output: 1 / sum, or 0 for a row without keys.
template <typename T>
FLASHCORE_HD T output_factor(T sum) {
  return sum == T(0) ? T(0) : T(1) / sum;
}

/// The output that a row accumulated over keys with this sum. Without keys the accumulator is 0
/// times V, which is NaN where V is not finite; the output is 0.
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

/// Math policy of the functions below: correctly rounded division, accurate exp. A backend with
/// approximate instructions passes its own.
struct AccurateMath {
  template <typename T>
  FLASHCORE_HD static T exp(T x) {
    return exp_scalar(x);
  }
  template <typename T>
  FLASHCORE_HD static T output_factor(T sum) {
    return core::output_factor(sum);
  }
};

/// The weight of a partial result with maximum max_i in a result with maximum max:
/// exp(max_i - max), exactly 1 if both are equal. The LSE of a partial result may stand for its
/// maximum.
template <typename Math = AccurateMath, typename T>
FLASHCORE_HD T partial_weight(T max_i, T max) {
  return Math::exp(max_i - softmax_base(max));
}

/// A row after its last key.
template <typename T>
struct FinalRow {
  T factor;               // of the accumulated output
  SoftmaxState<T> state;  // with the sink

  /// A function, because many calls want no LSE.
  FLASHCORE_HD T lse(Fault fault) const {
    const T natural = log_sum_exp(state);
    return fault.is(InjectedFault::lse_in_base_2) ? natural * static_cast<T>(kLog2E) : natural;
  }
};

/// A row's sink. Not given if the call has none, or if a later combine adds it.
struct Sink {
  bool given;
  const float* sinks;  // [q_heads]
  std::int32_t head;
  std::int64_t stride;
};

template <typename Math = AccurateMath, typename T>
FLASHCORE_HD FinalRow<T> finalize_row(SoftmaxState<T> state, const Sink& sink, Fault fault) {
  T factor = T(1);
  if (sink.given) factor = add_sink(state, static_cast<T>(sink.sinks[sink.head * sink.stride]));
  factor *=
      fault.is(InjectedFault::empty_row_is_nan) ? T(1) / state.sum : Math::output_factor(state.sum);
  return {factor, state};
}

}  // namespace flashcore::core
