// Attention by its definition, in long double: the reference of the oracle's own tests. Follows
// docs/numerics.md and shares no code with the oracle or the kernels.
#pragma once

#include <vector>

#include "support/call.h"

namespace flashcore::test {

struct NaiveRow {
  std::vector<long double> score, probability;  ///< per key of the sequence; hidden: score -inf
  std::vector<long double> out;
  long double lse, max, sum;
  // Terms of the error bound.
  long double magnitude;
  long double largest_product, largest_sum;
  std::vector<long double> spread, deviation, v_mass;
};

/// Query i of sequence b, query head h.
NaiveRow naive_row(const Inputs& inputs, std::int64_t b, std::int64_t h, std::int64_t i);

/// Queries of sequence b.
std::int64_t naive_q_len(const Inputs& inputs, std::int64_t b);

}  // namespace flashcore::test
