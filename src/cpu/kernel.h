// The interface of a CPU kernel: a function that computes one work tile.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace flashcore::cpu {

/// Computes work tile `index` of params.num_tiles. `scratch` holds core::scratch_layout().total
/// elements of the compute type, 64-byte aligned; the calling thread owns it. Once `cancel` is set,
/// returns early and stores nothing.
using TileFunction = void (*)(const core::AttentionParams& params, std::int64_t index,
                              void* scratch, const std::int32_t* cancel);

/// Measures peak arithmetic: runs `iterations` iterations of independent multiply-adds on registers
/// and returns the number of floating-point operations.
using PeakFunction = double (*)(std::int64_t iterations, float* sink);

/// The kernels of one instruction set, defined in target_<isa>.cc. Null: kernels.def has no row.
struct IsaKernels {
  TileFunction f32 = nullptr, f16 = nullptr, bf16 = nullptr, f64 = nullptr;
  TileFunction f32_rows = nullptr, f16_rows = nullptr, bf16_rows = nullptr;  // few rows
  PeakFunction peak = nullptr;
};

extern const IsaKernels kGenericKernels;
extern const IsaKernels kNeonKernels;
extern const IsaKernels kAvx2Kernels;
extern const IsaKernels kAvx512Kernels;
extern const IsaKernels kVnniKernels;
extern const IsaKernels kAmxKernels;

}  // namespace flashcore::cpu
