// The table of unseen mutants of the backward pass; frozen_backward.h says how to fill it.
#include "mutants/frozen_backward.h"

namespace flashcore::mutants {

std::vector<Mutant> frozen_backward_mutants() { return {}; }

}  // namespace flashcore::mutants
