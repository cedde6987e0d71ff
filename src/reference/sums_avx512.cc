#include "reference/sums-inl.h"

namespace flashcore::reference {

constinit const Sums kAvx512Sums = table("avx512");

}  // namespace flashcore::reference
