// Quantises and dequantises in host memory.
#pragma once

#include "core/quantize.h"
#include "flashcore/status.h"

namespace flashcore::cpu {

// Both functions stop soon after `cancel` is set; `cancel` may be null.

/// Writes nothing if a value or scale is invalid. Throws std::bad_alloc.
Status quantize(const core::QuantParams& params, int threads, const std::int32_t* cancel);

void dequantize(const core::QuantParams& params, int threads, const std::int32_t* cancel) noexcept;

}  // namespace flashcore::cpu
