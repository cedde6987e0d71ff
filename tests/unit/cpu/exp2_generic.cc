#define FLASHCORE_SIMD_BYTES 0
#define FLASHCORE_EXP2_PROBE kExp2Generic
#include "unit/cpu/exp2_probe-inl.h"
