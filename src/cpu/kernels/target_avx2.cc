// The CPU kernel for AVX2 with FMA and F16C: compiled with that instruction set's flags
// (cmake/cpu_kernels.cmake).
#define FLASHCORE_SIMD_BYTES 32
#include "cpu/kernels/fwd-inl.h"

namespace flashcore::cpu {
extern const IsaKernels kAvx2Kernels = kIsaKernels;
}
