// Softcap of small scores inside the exponent of the online softmax. tanh is monotonic: the row
// maximum is found among raw scores, and a score is capped where its exponent is computed.
#pragma once

#include "cuda/sm90/softmax.cuh"

namespace flashcore::cuda::sm90 {

/// Exponents of raw scores whose softcap is a polynomial. Row maxima are capped, in units of log2.
/// It costs as many instructions more than no softcap as it has terms.
template <int kTerms>
struct PolynomialCapExponent {
  const core::CapPolynomial<kTerms>& polynomial;

  __device__ __forceinline__ float of(float capped) const { return capped; }
  __device__ __forceinline__ float minus(float score, float base) const {
    return fmaf(score, polynomial.factor(score), -base);
  }
  __device__ __forceinline__ float difference(float x, float y) const { return __fsub_rn(x, y); }
};

enum class CapTier { formula, polynomial, short_polynomial, shortest_polynomial };

/// The cheapest exponent that is exact enough for all raw scores of the warp. lane_max: the highest
/// of each row in the lane. Polynomials spare the special-function units, but rows then depend on
/// their neighbours' scores: a batch-invariant call has no polynomials. hides_keys: some scores may
/// become -inf, for which the shortest polynomial, whose last coefficient is negative, is +inf.
template <typename C>
__device__ __forceinline__ CapTier cap_tier(const AccS<C>& acc_s, const float (&lane_max)[2],
                                            bool hides_keys, const Params& params) {
  // Non-negative floats have the order of their bits, and so have negative ones above them.
  const auto reduce_pairs = [&](auto identity, auto join) {
    decltype(identity) of_chain[2] = {identity, identity};
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; i += 2) {
      auto& x = of_chain[i / 2 % 2];
      x = join(x, __float_as_uint(acc_s[i]), __float_as_uint(acc_s[i + 1]));
    }
    return max(of_chain[0], of_chain[1]);
  };
  const unsigned lowest =
      reduce_pairs(0u, [](unsigned x, unsigned y, unsigned z) { return __vimax3_u32(x, y, z); });
  float highest = max_ignore_nan(lane_max[0], lane_max[1]);
  // A maximum ignores NaN, and the scores compared with it. A NaN that is not hidden makes its row
  // NaN with any exponent, but a hidden one must not hide other scores from the limits.
  if (hides_keys) {
    highest =
        __int_as_float(reduce_pairs(0, [](int x, int y, int z) { return __vimax3_s32(x, y, z); }));
  }
  const auto is_below = [&](float limit) {
    return __all_sync(0xffffffffu, highest <= limit && lowest <= __float_as_uint(-limit));
  };
  if (is_below(params.short_cap_polynomial.up_to)) {
    return !hides_keys && is_below(params.shortest_cap_polynomial.up_to)
               ? CapTier::shortest_polynomial
               : CapTier::short_polynomial;
  }
  return is_below(params.cap_polynomial.up_to) ? CapTier::polynomial : CapTier::formula;
}

/// The online softmax of raw scores with a softcap that `polynomial` computes.
template <typename C, int kTerms>
__device__ __forceinline__ void softcap_softmax(AccS<C>& acc_s, RowStats& row_stats,
                                                float (&rescale)[2], const float (&lane_max)[2],
                                                const core::CapPolynomial<kTerms>& polynomial,
                                                core::Fault fault) {
  float max[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    max[half] = max_ignore_nan(row_stats.of[half].max, polynomial(quad_max(lane_max[half])));
  }
  const PolynomialCapExponent<kTerms> exponent{polynomial};
  exponentials<C, 0, 2>(acc_s, row_stats, rescale, max, exponent, fault);
}

}  // namespace flashcore::cuda::sm90
