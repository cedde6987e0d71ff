#define FLASHCORE_SIMD_BYTES 32
#define FLASHCORE_EXP2_PROBE kExp2Avx2
#include "unit/cpu/exp2_probe-inl.h"
