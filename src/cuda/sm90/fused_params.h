// Launch parameters of a fused Hopper kernel for gradients.
#pragma once

#include "core/sm90_fused_order.h"
#include "cuda/sm90/bwd_params.h"

namespace flashcore::cuda::sm90 {

struct FusedParams : BwdParams {
  core::FusedOrder order;
  std::uint32_t* turns;  // [core::partial_tile()]: finished additions to a dQ tile; 0 before a call
};

}  // namespace flashcore::cuda::sm90
