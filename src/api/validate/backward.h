// Validation of calls that compute gradients.
#pragma once

#include "flashcore/backward.h"

namespace flashcore {

/// As describe() and check_memory() of problem.h, for gradients.
Status describe_backward(const Tensors& tensors, const Gradients& gradients, const Options& options,
                         BackwardProblem& problem) noexcept;
Status check_backward_memory(const Tensors& tensors, const Gradients& gradients) noexcept;

/// Checks that the given problem equals the planned one. The alignment may differ.
Status check_against_backward_plan(const BackwardProblem& planned,
                                   const BackwardProblem& given) noexcept;

}  // namespace flashcore
