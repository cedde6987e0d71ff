// Launch parameters of a Hopper kernel, made on the host for every call.
#pragma once

#include "cuda/sm90/bwd_params.h"
#include "cuda/sm90/fused_params.h"
#include "cuda/sm90/params.h"
#include "flashcore/backward.h"
#include "flashcore/plan.h"
#include "flashcore/status.h"

namespace flashcore::cuda {

/// Fills in the parameters of the plan's kernel.
Status make_sm90_params(const Plan& plan, const core::AttentionParams& call,
                        sm90::Params& params) noexcept;

/// The same for gradients.
Status make_sm90_bwd_params(const BackwardPlan& plan, const core::BackwardParams& call,
                            sm90::BwdParams& params) noexcept;

/// True if the kernel for calls without options computes the gradients: the plain entry.
bool takes_plain_sm90_path(const core::BackwardParams& p) noexcept;

/// The same for gradients in the fused form.
Status make_sm90_fused_params(const BackwardPlan& plan, const core::BackwardParams& call,
                              sm90::FusedParams& params) noexcept;

}  // namespace flashcore::cuda
