// The CPU kernel for AVX2 with FMA and F16C. cmake/cpu_kernels.cmake sets the compiler flags.
#define FLASHCORE_SIMD_BYTES 32
#include "cpu/kernels/fwd-inl.h"

namespace flashcore::cpu {
extern const IsaKernels kAvx2Kernels = kFmaKernels;
}
