#include "reference/sums.h"

namespace flashcore::reference {

const Sums& sums() {
#if defined(__x86_64__)
  static const Sums& best = __builtin_cpu_supports("avx512f") ? kAvx512Sums
                            : __builtin_cpu_supports("avx2")  ? kAvx2Sums
                                                              : kGenericSums;
  return best;
#else
  return kGenericSums;
#endif
}

}  // namespace flashcore::reference
