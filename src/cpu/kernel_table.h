// The instruction sets compiled into this build.
#pragma once

#include "cpu/kernel.h"
#include "flashcore/plan.h"

namespace flashcore::cpu {

/// Null if this build has no kernels for the instruction set.
inline const IsaKernels* isa_kernels(Isa isa) noexcept {
  switch (isa) {
    case Isa::generic: return &kGenericKernels;
#if defined(__aarch64__)
    case Isa::neon: return &kNeonKernels;
#elif defined(__x86_64__)
    case Isa::avx2: return &kAvx2Kernels;
    case Isa::avx512: return &kAvx512Kernels;
    case Isa::vnni: return &kVnniKernels;
    case Isa::amx: return &kAmxKernels;
#endif
    default: return nullptr;
  }
}

}  // namespace flashcore::cpu
