// Quantising and dequantising in host memory.
#pragma once

#include "core/quantize.h"
#include "flashcore/status.h"

namespace flashcore::cpu {

// Both leave off soon after `cancel` (it may be null) is set.

/// Nothing is written where anything is wrong. Throws std::bad_alloc.
Status quantize(const core::QuantParams& params, int threads, const std::int32_t* cancel);

void dequantize(const core::QuantParams& params, int threads, const std::int32_t* cancel) noexcept;

}  // namespace flashcore::cpu
