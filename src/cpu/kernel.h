// How the launcher sees a CPU kernel: a function that does one work item.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace flashcore::cpu {

/// Computes work item `item` of params.num_tiles. `scratch` holds core::scratch_layout().total
/// elements of the compute type, 64-byte aligned, owned by the calling thread. Returns early, with
/// nothing stored, once `cancel` is set.
using ItemFunction = void (*)(const core::AttentionParams& params, std::int64_t item, void* scratch,
                              const std::int32_t* cancel);

/// Runs `iterations` rounds of independent multiply-adds on registers and returns how many
/// floating-point operations that was: the measure of the cores' peak.
using PeakFunction = double (*)(std::int64_t iterations, float* sink);

/// One per instruction set, defined in target_<isa>.cc.
struct IsaKernels {
  ItemFunction f32, f16, bf16, f64;
  PeakFunction peak;
};

extern const IsaKernels kGenericKernels;
extern const IsaKernels kNeonKernels;
extern const IsaKernels kAvx2Kernels;
extern const IsaKernels kAvx512Kernels;

}  // namespace flashcore::cpu
