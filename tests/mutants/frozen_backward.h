// The next table of mutants of the backward pass, written by someone who has not read the probes.
//
// Its parts are frozen_backward_mutants*.cc, one function each, declared here and joined in
// frozen_backward_mutants.cc. Once the probes are extended for the table, its files are renamed
// bwd_<number>_<kind>.cc (third, fourth, ...), listed in first_backward_mutants.cc, and this place
// is empty again.
#pragma once

#include "mutants/bwd_tools.h"

namespace flashcore::mutants {

// The parts of frozen_backward_mutants().

}  // namespace flashcore::mutants
