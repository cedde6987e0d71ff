// The CPU kernel for AVX-512 (F, VL, BW, DQ): compiled with that instruction set's flags
// (cmake/cpu_kernels.cmake).
#define FLASHCORE_SIMD_BYTES 64
#include "cpu/kernels/fwd-inl.h"

namespace flashcore::cpu {
extern const IsaKernels kAvx512Kernels = kIsaKernels;
}
