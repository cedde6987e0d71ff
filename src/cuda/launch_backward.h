// The launches of a call for gradients.
#pragma once

#include "flashcore/backward.h"

namespace flashcore::core {
struct BackwardParams;
}

namespace flashcore::cuda {

/// Launches, in stream order: zeros for varlen gradients, row statistics, the plan's kernel,
/// dsinks. Allocates nothing, so a graph can capture it.
Status launch_backward(const BackwardPlan& plan, const core::BackwardParams& params, Stream stream);

}  // namespace flashcore::cuda
