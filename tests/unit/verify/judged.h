// A problem, its oracle, and a result that a test spoils before it is compared.
#pragma once

#include "support/draw.h"
#include "verify/inputs/compare.h"

namespace flashcore::test {

struct Judged {
  /// The result is the oracle's own, rounded to the output's format.
  explicit Judged(const Inputs& inputs, DType out_dtype = DType::none);

  verify::Comparison compare() const;

  Inputs inputs;
  Output output;
  reference::Oracle oracle;
  verify::Arithmetic arithmetic;
};

/// (2, 4 heads on 2, 6 x `kv_len`, 16/16) in f32 unless told otherwise, normal with `sigma`.
Inputs usual_inputs(std::uint64_t seed, DType dtype = DType::f32, double sigma = 1.0,
                    std::int64_t kv_len = 40);

}  // namespace flashcore::test
