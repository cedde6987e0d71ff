#define FLASHCORE_SIMD_BYTES 16
#define FLASHCORE_EXP2_PROBE kExp2Neon
#include "unit/cpu/exp2_probe-inl.h"
