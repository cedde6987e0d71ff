// The CPU kernel in plain C++: the baseline that every machine can run and every test includes.
#define FLASHCORE_SIMD_BYTES 0
#include "cpu/kernels/fwd-inl.h"

namespace flashcore::cpu {
extern const IsaKernels kGenericKernels = kIsaKernels;
}
