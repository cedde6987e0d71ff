#include "reference/sums-inl.h"

namespace flashcore::reference {

constinit const Sums kGenericSums = table("generic");

}  // namespace flashcore::reference
