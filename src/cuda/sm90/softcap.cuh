// Softcap of small scores inside the exponent of the online softmax. tanh is monotonic: the row
// maximum is found among raw scores, and a score is capped where its exponent is computed.
#pragma once

#include "cuda/sm90/softmax.cuh"

namespace flashcore::cuda::sm90 {

/// Exponents of raw scores whose softcap is a polynomial. Row maxima are capped, in units of log2.
/// It costs three instructions more than no softcap.
template <int kTerms>
struct PolynomialCapExponent {
  const core::CapPolynomial<kTerms>& polynomial;

  __device__ __forceinline__ float of(float capped) const { return capped; }
  __device__ __forceinline__ float minus(float score, float base) const {
    return fmaf(score, polynomial.factor(score), -base);
  }
  __device__ __forceinline__ float difference(float x, float y) const { return __fsub_rn(x, y); }
};

enum class CapTier { formula, polynomial, short_polynomial };

/// The cheapest exponent that is exact enough for all raw scores of the warp. Polynomials spare the
/// special-function units, but rows then depend on their neighbours' scores: a batch-invariant call
/// has no polynomials.
template <typename C>
__device__ __forceinline__ CapTier cap_tier(const AccS<C>& acc_s, const Params& params) {
  if (!C::kCapsExponents || !params.caps_exponents) return CapTier::formula;
  // Non-negative floats have the order of their bits, and so have negative ones above them.
  constexpr int kChains = 2;
  int high[kChains] = {};
  unsigned low[kChains] = {};
#pragma unroll
  for (int i = 0; i < C::kTileK / 2; i += 2) {
    const int chain = i / 2 % kChains;
    high[chain] = __vimax3_s32(high[chain], __float_as_int(acc_s[i]), __float_as_int(acc_s[i + 1]));
    low[chain] = __vimax3_u32(low[chain], __float_as_uint(acc_s[i]), __float_as_uint(acc_s[i + 1]));
  }
  const float highest = __int_as_float(max(high[0], high[1]));
  const unsigned lowest = max(low[0], low[1]);
  const auto is_below = [&](float limit) {
    return __all_sync(0xffffffffu, highest <= limit && lowest <= __float_as_uint(-limit));
  };
  return is_below(params.short_cap_polynomial.up_to) ? CapTier::short_polynomial
         : is_below(params.cap_polynomial.up_to)     ? CapTier::polynomial
                                                     : CapTier::formula;
}

/// The online softmax of raw scores with a softcap that `polynomial` computes.
template <typename C, int kTerms>
__device__ __forceinline__ void softcap_softmax(AccS<C>& acc_s, RowStats& row_stats,
                                                float (&rescale)[2],
                                                const core::CapPolynomial<kTerms>& polynomial,
                                                core::Fault fault) {
  float max[2];
  find_row_max<C, 0, 2>(max, acc_s, init_row_stats());
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    max[half] = max_ignore_nan(row_stats.of[half].max, polynomial(max[half]));
  }
  const PolynomialCapExponent<kTerms> exponent{polynomial};
  exponentials<C, 0, 2>(acc_s, row_stats, rescale, max, exponent, fault);
}

}  // namespace flashcore::cuda::sm90
