// Mutants of the backward pass, written by someone who has not read the probes.
//
// The parts of a table are frozen_backward_mutants*.cc, one function each, declared here and
// joined in frozen_backward_mutants.cc. Once the probes are extended for the table, its files are
// renamed bwd_<number>_<kind>.cc (fifth, sixth, ...), listed in first_backward_mutants.cc, and this
// place is empty again.
#pragma once

#include <vector>

#include "mutants/bwd_pairs.h"

namespace flashcore::mutants {

// The parts of frozen_backward_mutants(): none at present.

}  // namespace flashcore::mutants
