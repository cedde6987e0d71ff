// The tensor maps that TMA reads Q, K and V through, made on the host for every call.
#pragma once

#include "cuda/sm90/params.h"
#include "flashcore/plan.h"
#include "flashcore/status.h"

namespace flashcore::cuda {

/// Fills in everything of a Hopper kernel's parameters, from a plan that takes one.
Status make_sm90_params(const Plan& plan, const core::AttentionParams& call,
                        sm90::Params& params) noexcept;

}  // namespace flashcore::cuda
