// Parts of the planner of gradients that the tools share.
#pragma once

#include "flashcore/backward.h"
#include "plan/planner.h"

namespace flashcore {

/// The first reason why a kernel cannot compute the gradients of a problem. `problem` is the
/// forward's.
Reject supports_backward(const KernelInfo& kernel, const Problem& problem,
                         const DeviceInfo& device) noexcept;
/// The same, and whether it takes the layouts and types of the gradients.
Reject supports_backward(const KernelInfo& kernel, const BackwardProblem& problem,
                         const DeviceInfo& device) noexcept;

}  // namespace flashcore
