// The CPU kernels for gradients, with the instruction set of target_avx512.cc.
#define FLASHCORE_SIMD_BYTES 64
#include "cpu/kernels/bwd-inl.h"

namespace flashcore::cpu {
extern const BackwardKernels kAvx512BackwardKernels = kBackwardKernels;
}
