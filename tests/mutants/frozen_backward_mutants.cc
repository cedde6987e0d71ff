// Mutants of the backward pass, written after its probes were frozen.
#include "mutants/mutants.h"

namespace flashcore::mutants {

std::vector<Mutant> frozen_backward_mutants() { return {}; }

}  // namespace flashcore::mutants
