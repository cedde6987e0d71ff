// exp2 and exp functions of one instruction set, for their test.
#pragma once

namespace flashcore::test {

/// `count` must be a multiple of 16.
struct Exp2Probe {
  void (*floats)(const float* x, float* result, int count);
  void (*doubles)(const double* x, double* result, int count);
  void (*natural_floats)(const float* x, float* result, int count);
  void (*natural_doubles)(const double* x, double* result, int count);
};

extern const Exp2Probe kExp2Generic, kExp2Neon, kExp2Avx2, kExp2Avx512, kExp2Vnni, kExp2Amx;

}  // namespace flashcore::test
