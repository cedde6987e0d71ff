// Launch parameters of a fused Hopper kernel for gradients.
#pragma once

#include "core/sm90_fused_order.h"
#include "cuda/sm90/bwd_params.h"

namespace flashcore::cuda::sm90 {

struct FusedParams : BwdParams {
  core::FusedOrder order;
  std::uint32_t* turns;  // [core::partial_tile()]: finished additions to a dQ tile; 0 before a call
  bool reads_sums_ahead;  // from memory into L2; the dQ sums of a section do not stay there
};

}  // namespace flashcore::cuda::sm90
