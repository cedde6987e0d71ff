// Quantising and dequantising in host memory.
#pragma once

#include "core/quantize.h"
#include "flashcore/status.h"

namespace flashcore::cpu {

/// Nothing is written where anything is wrong. Throws std::bad_alloc.
Status quantize(const core::QuantParams& params, int threads);

void dequantize(const core::QuantParams& params, int threads) noexcept;

}  // namespace flashcore::cpu
