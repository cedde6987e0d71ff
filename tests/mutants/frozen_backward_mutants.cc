// Mutants of the backward pass that its probes have not seen: none at present.
#include "mutants/frozen_backward.h"

namespace flashcore::mutants {

std::vector<Mutant> frozen_backward_mutants() { return {}; }

}  // namespace flashcore::mutants
