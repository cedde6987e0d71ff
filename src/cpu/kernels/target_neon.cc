// The CPU kernel for NEON: compiled with that instruction set's flags (cmake/cpu_kernels.cmake).
#define FLASHCORE_SIMD_BYTES 16
#include "cpu/kernels/fwd-inl.h"

namespace flashcore::cpu {
extern const IsaKernels kNeonKernels = kIsaKernels;
}
