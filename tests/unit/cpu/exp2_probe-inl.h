// exp2 and exp of cpu/kernels/simd.h as ordinary functions, once per instruction set. exp2_<isa>.cc
// sets FLASHCORE_SIMD_BYTES and FLASHCORE_EXP2_PROBE and includes this file. The standard library
// is not allowed here; simd.h explains why.
#pragma once

#include "cpu/kernels/simd.h"
#include "unit/cpu/exp2_probe.h"

namespace flashcore::test {
namespace {

template <typename T>
void exp2_all(const T* x, T* result, int count) {
  for (int i = 0; i < count; i += cpu::kLanes<T>) {
    cpu::store(result + i, cpu::exp2<T>(cpu::load(x + i)));
  }
}

template <typename T>
void exp_all(const T* x, T* result, int count) {
  for (int i = 0; i < count; i += cpu::kLanes<T>) {
    cpu::store(result + i, cpu::exp<T>(cpu::load(x + i)));
  }
}

}  // namespace

extern const Exp2Probe FLASHCORE_EXP2_PROBE;
const Exp2Probe FLASHCORE_EXP2_PROBE = {exp2_all<float>, exp2_all<double>, exp_all<float>,
                                        exp_all<double>};

}  // namespace flashcore::test
