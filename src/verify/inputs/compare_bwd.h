// Compares gradients with the oracle under the bound of docs/numerics.md, "Gradients".
#pragma once

#include "reference/oracle_bwd.h"
#include "verify/inputs/compare.h"

namespace flashcore::verify {

/// The bound of element i of a gradient.
double gradient_bound(const reference::Gradient& gradient, std::size_t i,
                      const Arithmetic& arithmetic);

/// Compares the gradients that `result` has. They are in host memory. `probability` is the type of
/// P as the kernel stores it.
Comparison compare_gradients(const reference::GradientOracle& oracle, const Gradients& result,
                             DType probability);

}  // namespace flashcore::verify
