// The CPU kernels for AVX-512 with VNNI: few rows, integer K and V. cmake/cpu_kernels.cmake sets
// the compiler flags.
#define FLASHCORE_SIMD_BYTES 64
#include "cpu/kernels/fwd-inl.h"
#include "cpu/kernels/gemv_vnni-inl.h"

namespace flashcore::cpu {
extern const IsaKernels kVnniKernels = {
    .f16_rows = process_tile<RowsLoop<F16, IntegerDots<F16>>>,
    .bf16_rows = process_tile<RowsLoop<Bf16, IntegerDots<Bf16>>>,
    .peak = multiply_add_peak,
};
}
