// The CPU kernels for AVX-512 (F, VL, BW, DQ). cmake/cpu_kernels.cmake sets the compiler flags.
#define FLASHCORE_SIMD_BYTES 64
#include "cpu/kernels/fwd-inl.h"
#include "cpu/kernels/gemv-inl.h"

namespace flashcore::cpu {
extern const IsaKernels kAvx512Kernels = {
    .f32 = kFmaTile<float, float>,
    .f16 = kFmaTile<float, F16>,
    .bf16 = kFmaTile<float, Bf16>,
    .f64 = kFmaTile<double, double>,
    .f32_rows = process_tile<RowsLoop<float>>,
    .f16_rows = process_tile<RowsLoop<F16>>,
    .bf16_rows = process_tile<RowsLoop<Bf16>>,
    .peak = multiply_add_peak,
};
}
