// How the test of exp2 sees one instruction set.
#pragma once

namespace flashcore::test {

/// count is a multiple of 16.
struct Exp2Probe {
  void (*floats)(const float* x, float* result, int count);
  void (*doubles)(const double* x, double* result, int count);
};

extern const Exp2Probe kExp2Plain, kExp2Neon, kExp2Avx2, kExp2Avx512;

}  // namespace flashcore::test
