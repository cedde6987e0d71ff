// Is a result right? Compares it with the oracle under a bound derived from the problem itself; the
// rule and its derivation are in docs/numerics.md.
#pragma once

#include <string>
#include <vector>

#include "flashcore/plan.h"
#include "reference/oracle.h"

namespace flashcore::verify {

/// Unit roundoffs of an implementation: of the output, of P as stored, of the accumulation; and the
/// spacing of the output format at 0 and of P, below which they are flushed. Our kernels keep
/// scores in f32; an implementation that rounds them to its inputs' format has a score_unit.
struct Arithmetic {
  double out_unit, p_unit, sum_unit, out_smallest, p_smallest;
  double score_unit = 0;
  double product_unit = 0;  ///< of the largest of a score's products, that its sum may be off by
  bool scales_p = false;    ///< P takes the scales of values before it is rounded
  bool cuts_sums = false;   ///< tensor cores: a score's sum is cut off, not rounded
};
Arithmetic arithmetic_of(DType out, DType probability);

struct ElementError {
  reference::RowId row{};
  std::int64_t column = -1;  ///< -1: the LSE
  double got = 0, want = 0, bound = 0;
  double error() const { return got - want; }
};

struct Comparison {
  bool ok = false;
  std::string reason;             ///< of failure: the first rule broken
  std::int64_t elements = 0;      ///< of out
  std::int64_t lse_elements = 0;  ///< judged like those of out, and counted below like them
  std::int64_t over_bound = 0;
  std::int64_t unwritten = 0;   ///< elements that still hold the poison
  std::int64_t non_finite = 0;  ///< elements finite in one of the two and not in the other
  std::int64_t sign_flips = 0;  ///< wrong sign where |want| exceeds the bound
  double max_error = 0, mean_error = 0;
  double bias = 0;              ///< mean of got - want
  double relative_error = 0;    ///< |got - want|₂ / |want|₂: for people, not for the verdict
  double worst_ratio = 0;       ///< max |error| / bound
  double worst_head_ratio = 0;  ///< max over heads of |error|₂ / (½ |bound|₂)
  double max_lse_error = 0;
  ElementError worst;
  std::vector<ElementError> samples;  ///< five elements, spread over the tensor
};

/// out and lse (may be null) are host memory laid out as the problem says.
Comparison compare(const reference::Oracle& oracle, const Problem& problem, const Tensors& result,
                   const Arithmetic& arithmetic);

/// The bound of one output element (index r * v_dim + c) and of one LSE.
double out_bound(const reference::Oracle& oracle, std::size_t row, std::size_t column,
                 const Arithmetic& arithmetic);
double lse_bound(const reference::Oracle& oracle, std::size_t row, const Arithmetic& arithmetic);

/// What a score of the row may be off by that is computed and kept in accumulators.
double score_bound(const reference::Oracle& oracle, std::size_t row, const Arithmetic& arithmetic);

/// Several lines for people: the worst element and its index, errors, shares, samples.
std::string report(const Comparison& comparison);

}  // namespace flashcore::verify
