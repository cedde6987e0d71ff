#define FLASHCORE_SIMD_BYTES 0
#define FLASHCORE_EXP2_PROBE kExp2Plain
#include "unit/exp2_probe-inl.h"
