// The probes in execution order: a probe relies on the ones above it.
#pragma once

#include <span>
#include <string>

#include "verify/probe_sequence.h"

namespace flashcore::verify {

struct Probe {
  const char* name;
  const char* question;
  Finding (*run)(ProbeSequence&, std::int64_t head_dim);
  /// Returns the reason why this probe cannot run on the implementation; empty if it can.
  std::string (*why_not)(const ProbeSequence&);
  enum class Dims { first, two_if_quick, all } dims;  ///< head dims to run at
  bool compares_calls = false;  ///< repeats calls itself, so it is not repeated to confirm a fault
};

std::span<const Probe> forward_probes();
std::span<const Probe> gradient_probes();

}  // namespace flashcore::verify
