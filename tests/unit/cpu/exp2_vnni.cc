#define FLASHCORE_SIMD_BYTES 64
#define FLASHCORE_EXP2_PROBE kExp2Vnni
#include "unit/cpu/exp2_probe-inl.h"
