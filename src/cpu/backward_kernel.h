// The interface of the CPU kernels that compute gradients.
#pragma once

#include <cstdint>

#include "core/backward_params.h"

namespace flashcore::cpu {

/// Computes work tile `index` of core::backward_tiles(params, step). `scratch` holds
/// core::backward_scratch().total elements of the compute type, 64-byte aligned; the calling thread
/// owns it. Once `cancel` is set, returns early.
using BackwardFunction = void (*)(const core::BackwardParams& params, core::BackwardStep step,
                                  std::int64_t index, void* scratch, const std::int32_t* cancel);

/// The kernels of one instruction set, defined in target_<isa>_bwd.cc.
struct BackwardKernels {
  BackwardFunction f32, f16, bf16, f64;
};

extern const BackwardKernels kGenericBackwardKernels;
extern const BackwardKernels kNeonBackwardKernels;
extern const BackwardKernels kAvx2BackwardKernels;
extern const BackwardKernels kAvx512BackwardKernels;

}  // namespace flashcore::cpu
