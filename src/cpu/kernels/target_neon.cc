// The CPU kernel for NEON. cmake/cpu_kernels.cmake sets the compiler flags.
#define FLASHCORE_SIMD_BYTES 16
#include "cpu/kernels/fwd-inl.h"

namespace flashcore::cpu {
extern const IsaKernels kNeonKernels = kFmaKernels;
}
