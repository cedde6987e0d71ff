// The CPU kernel for AVX-512 (F, VL, BW, DQ). cmake/cpu_kernels.cmake sets the compiler flags.
#define FLASHCORE_SIMD_BYTES 64
#include "cpu/kernels/fwd-inl.h"

namespace flashcore::cpu {
extern const IsaKernels kAvx512Kernels = kFmaKernels;
}
