// Compares a result with the oracle under a bound derived from the problem. docs/numerics.md has
// the rule and its derivation.
#pragma once

#include <string>
#include <vector>

#include "flashcore/plan.h"
#include "reference/oracle.h"

namespace flashcore::verify {

/// Unit roundoffs of an implementation (output, stored P, accumulation), and the smallest values of
/// output and P that are not flushed. score_unit is nonzero if the implementation rounds scores to
/// the format of its inputs; the kernels of this library store scores in f32.
struct Arithmetic {
  double out_unit, p_unit, sum_unit, out_smallest, p_smallest;
  double score_unit = 0;
  double product_unit = 0;      ///< error of a score, relative to its largest product
  bool scales_p = false;        ///< P is multiplied by the scales of V before it is rounded
  bool truncates_sums = false;  ///< tensor cores truncate the sum of a score
};
Arithmetic arithmetic_of(DType out, DType probability);

struct ElementError {
  reference::RowId row{};
  std::int64_t column = -1;  ///< -1: the LSE
  double got = 0, want = 0, bound = 0;
  const char* tensor = nullptr;  ///< null: out or lse; else the gradient, with `row.i` its row
  double error() const { return got - want; }
};

struct Comparison {
  bool ok = false;
  std::string reason;             ///< first rule that is broken; empty: ok
  std::int64_t elements = 0;      ///< compared elements of out
  std::int64_t lse_elements = 0;  ///< included in the counts below
  std::int64_t over_bound = 0;
  std::int64_t unwritten = 0;   ///< elements that still contain the poison
  std::int64_t non_finite = 0;  ///< elements that are finite in only one of result and oracle
  std::int64_t sign_flips = 0;  ///< wrong sign where |want| exceeds the bound
  double max_error = 0, mean_error = 0;
  double bias = 0;              ///< mean of got - want
  double relative_error = 0;    ///< |got - want|₂ / |want|₂, for information only
  double worst_ratio = 0;       ///< max |error| / bound
  double worst_head_ratio = 0;  ///< max over heads of |error|₂ / (½ |bound|₂)
  double max_lse_error = 0;
  ElementError worst;
  std::vector<ElementError> samples;  ///< five elements at regular distances
};

/// out and lse (may be null) are host memory in the layout of the problem.
Comparison compare(const reference::Oracle& oracle, const Problem& problem, const Tensors& result,
                   const Arithmetic& arithmetic);

/// The bound of one output element (index r * v_dim + c) and of one LSE.
double out_bound(const reference::Oracle& oracle, std::size_t row, std::size_t column,
                 const Arithmetic& arithmetic);
double lse_bound(const reference::Oracle& oracle, std::size_t row, const Arithmetic& arithmetic);

/// Error bound of a score in the accumulator format.
double score_bound(const reference::Oracle& oracle, std::size_t row, const Arithmetic& arithmetic);

/// Several lines of text: the worst element and its index, errors, counts, samples.
std::string report(const Comparison& comparison);

}  // namespace flashcore::verify
