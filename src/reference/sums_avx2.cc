#include "reference/sums-inl.h"

namespace flashcore::reference {

constinit const Sums kAvx2Sums = table("avx2");

}  // namespace flashcore::reference
