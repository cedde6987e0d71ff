// One row of a benchmark: a case on a kernel, checked and only then timed.
#pragma once

#include <optional>
#include <string>

#include "bench/timing.h"
#include "check/check.h"
#include "data/cases.h"
#include "data/devices.h"

namespace flashcore::tool {

struct BenchRow {
  BenchCase bench_case;
  Plan plan;
  verify::Comparison comparison;
  Timing timing;
  double floor_us = 0;
  int copies = 1;  ///< of the inputs, taken in turn
};

/// What came of a case: a row, or why there is none.
struct BenchOutcome {
  std::optional<BenchRow> row;
  std::string check_failure;  ///< the check failed: nothing was timed
  std::string report;         ///< of the failure, for people
  std::string skipped;        ///< could not be run here
};

/// `kernel` null: the planner's choice. Where the case says cold_l2, calls on a GPU rotate over
/// copies of the inputs that do not fit its cache.
BenchOutcome bench_case_on(const BenchCase& bench_case, const KernelInfo* kernel,
                           const Target& target, const BenchArgs& args, const Stop& stop);

/// What one make_plan() + run() costs the calling thread.
struct HostCost {
  double us = 0;
  double launch_us = 0;  ///< of it, what a kernel that does nothing costs here; 0 on a CPU
  std::string problem;   ///< of which it was measured
};

/// On a GPU of the given problem, which the device computes meanwhile; on a CPU, where run()
/// computes itself, of one query and one key, so that next to no arithmetic is in it.
HostCost host_cost(const verify::CaseSpec& spec, const Target& target);

}  // namespace flashcore::tool
