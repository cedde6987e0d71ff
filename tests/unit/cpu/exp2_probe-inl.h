// cpu/kernels/simd.h's exp2 as a plain function, once per instruction set. Included by
// exp2_<isa>.cc with FLASHCORE_SIMD_BYTES and FLASHCORE_EXP2_PROBE set. Nothing here may come from
// the standard library: see simd.h.
#pragma once

#include "cpu/kernels/simd.h"
#include "unit/cpu/exp2_probe.h"

namespace flashcore::test {
namespace {

template <typename T>
void exp2_all(const T* x, T* result, int count) {
  for (int i = 0; i < count; i += cpu::kLanes<T>) {
    cpu::store(result + i, cpu::exp2(cpu::load(x + i)));
  }
}

}  // namespace

extern const Exp2Probe FLASHCORE_EXP2_PROBE;
const Exp2Probe FLASHCORE_EXP2_PROBE = {exp2_all<float>, exp2_all<double>};

}  // namespace flashcore::test
