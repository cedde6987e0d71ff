// The CPU kernels for gradients, with the instruction set of target_avx2.cc.
#define FLASHCORE_SIMD_BYTES 32
#include "cpu/kernels/bwd-inl.h"

namespace flashcore::cpu {
extern const BackwardKernels kAvx2BackwardKernels = kBackwardKernels;
}
