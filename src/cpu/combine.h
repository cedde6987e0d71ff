// Combines partial results on the CPU.
#pragma once

#include "core/combine.h"
#include "flashcore/types.h"

namespace flashcore::cpu {

/// Splits the rows over up to `threads` threads. partials: f64, else f32. Leaves off soon after
/// `cancel` (it may be null) is set.
void combine(const core::CombineParams& params, DType partials, int threads,
             const std::int32_t* cancel) noexcept;

}  // namespace flashcore::cpu
