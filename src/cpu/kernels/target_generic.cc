// The CPU kernel in portable C++: the baseline, which runs on every machine and in every test.
#define FLASHCORE_SIMD_BYTES 0
#include "cpu/kernels/fwd-inl.h"

namespace flashcore::cpu {
extern const IsaKernels kGenericKernels = kFmaKernels;
}
