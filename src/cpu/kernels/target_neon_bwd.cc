// The CPU kernels for gradients, with the instruction set of target_neon.cc.
#define FLASHCORE_SIMD_BYTES 16
#include "cpu/kernels/bwd-inl.h"

namespace flashcore::cpu {
extern const BackwardKernels kNeonBackwardKernels = kBackwardKernels;
}
