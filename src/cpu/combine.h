// Joining partial results on the CPU.
#pragma once

#include "core/combine.h"
#include "flashcore/types.h"

namespace flashcore::cpu {

/// Splits the rows over up to `threads` threads. partials: f64, else f32.
void combine(const core::CombineParams& params, DType partials, int threads) noexcept;

}  // namespace flashcore::cpu
