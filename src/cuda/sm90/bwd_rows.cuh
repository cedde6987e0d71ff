// Numbers of a query row that P and dZ need, from the workspace (common/backward.cu).
#pragma once

#include "core/ds_unit.h"
#include "core/score.h"
#include "cuda/sm90/bwd_config.cuh"

namespace flashcore::cuda::sm90 {

/// The base of a row in units of log2, which includes its factor. inf makes P 0: a factor of 0, or
/// an lse below all scores that have a weight, whose -inf would make P of a hidden pair NaN.
__device__ __forceinline__ float log2_base(const core::BackwardParams& p, std::int64_t at) {
  const float base = static_cast<const float*>(p.row_base)[at];
  const float factor = static_cast<const float*>(p.row_factor)[at];
  const float base_log2 = base * static_cast<float>(core::kLog2E) - __log2f(factor);
  return base_log2 == core::negative_infinity<float>() ? -base_log2 : base_log2;
}

__device__ __forceinline__ float row_delta(const core::BackwardParams& p, std::int64_t at,
                                           bool has_next) {
  const core::Fault fault = p.fwd.fault;
  if (fault.is(InjectedFault::delta_ignored)) return 0.f;
  const bool next = fault.is(InjectedFault::delta_of_next_row) && has_next;
  return static_cast<const float*>(p.row_delta)[at + (next ? 1 : 0)];
}

__device__ __forceinline__ float alibi_slope(const core::BackwardParams& p, std::int32_t b,
                                             std::int32_t h) {
  return p.fwd.alibi_slopes == nullptr ? 0.f : core::ScoreRow<float>{p.fwd, b, h, 0}.slope();
}

}  // namespace flashcore::cuda::sm90
