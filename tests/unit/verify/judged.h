// A problem, its oracle, and a correct result. Tests change the result, then compare.
#pragma once

#include "support/draw.h"
#include "verify/inputs/compare.h"

namespace flashcore::test {

struct Judged {
  /// The result is the oracle's, rounded to the format of the output.
  explicit Judged(const Inputs& inputs, DType out_dtype = DType::none);

  verify::Comparison compare() const;

  Inputs inputs;
  Output output;
  reference::Oracle oracle;
  verify::Arithmetic arithmetic;
};

/// batch 2, 4 query heads, 2 KV heads, q_len 6, dims 16/16, normal with standard deviation `sigma`.
Inputs default_inputs(std::uint64_t seed, DType dtype = DType::f32, double sigma = 1.0,
                      std::int64_t kv_len = 40);

}  // namespace flashcore::test
