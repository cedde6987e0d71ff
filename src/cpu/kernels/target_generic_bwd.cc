// The CPU kernels for gradients, with the instruction set of target_generic.cc.
#define FLASHCORE_SIMD_BYTES 0
#include "cpu/kernels/bwd-inl.h"

namespace flashcore::cpu {
extern const BackwardKernels kGenericBackwardKernels = kBackwardKernels;
}
