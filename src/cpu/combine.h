// Combines partial results on the CPU.
#pragma once

#include "core/combine.h"
#include "flashcore/types.h"

namespace flashcore::cpu {

/// Distributes the rows over up to `threads` threads. `partials` is f64 or f32. Stops soon after
/// `cancel` is set; `cancel` may be null.
void combine(const core::CombineParams& params, DType partials, int threads,
             const std::int32_t* cancel) noexcept;

}  // namespace flashcore::cpu
