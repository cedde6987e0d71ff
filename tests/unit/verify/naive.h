// Attention from its definition in long double, for the oracle to be compared with. Written from
// docs/numerics.md on owned tensors, sharing no code with the oracle or the kernels.
#pragma once

#include <vector>

#include "support/call.h"

namespace flashcore::test {

struct NaiveRow {
  std::vector<long double> score, probability;  ///< per key of the sequence; -inf where hidden
  std::vector<long double> out;
  long double lse, max, sum;
  // What the error bound is made of.
  long double magnitude;
  long double largest_product, largest_sum;
  std::vector<long double> spread, deviation, v_mass;
};

/// Query i of sequence b, query head h.
NaiveRow naive_row(const Inputs& inputs, std::int64_t b, std::int64_t h, std::int64_t i);

/// Queries of sequence b.
std::int64_t naive_q_len(const Inputs& inputs, std::int64_t b);

}  // namespace flashcore::test
