// The CPU kernels for AMX bf16 with AVX-512. cmake/cpu_kernels.cmake sets the compiler flags.
#define FLASHCORE_SIMD_BYTES 64
#include "cpu/kernels/fwd-inl.h"
#include "cpu/kernels/gemm_amx-inl.h"

namespace flashcore::cpu {
extern const IsaKernels kAmxKernels = {.f32 = process_tile<PanelLoop<AmxGemm<float>>>,
                                       .f16 = process_tile<PanelLoop<AmxGemm<F16>>>,
                                       .bf16 = process_tile<PanelLoop<AmxGemm<Bf16>>>,
                                       .peak = multiply_add_peak};
}
