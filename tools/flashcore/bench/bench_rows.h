// One row of a benchmark: a case on a kernel, timed only after it passed its check.
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
  double roofline_us = 0;
  int copies = 1;  ///< of the inputs, used in turn
};

/// Outcome of a case: a row, or the reason why there is none.
struct BenchOutcome {
  std::optional<BenchRow> row;
  std::string check_failure;  ///< why the check failed; nothing was timed
  std::string report;         ///< text of the failed check
  std::string skipped;        ///< why it could not run here
};

/// Checks and times a case. A null kernel is the planner's choice. With cold_l2, calls on a GPU
/// rotate over copies of the inputs that exceed its L2.
BenchOutcome bench_case_on(const BenchCase& bench_case, const KernelInfo* kernel,
                           const Target& target, const BenchArgs& args, const Stop& stop);

/// Time that one make_plan() + run() takes on the calling thread.
struct HostCost {
  double us = 0;
  double launch_us = 0;  ///< the part of an empty kernel's launch; 0 on a CPU
  std::string problem;   ///< the problem it was measured with
};

/// On a GPU, measures the given problem, which the device computes meanwhile. On a CPU, run()
/// itself computes, so it measures one query and one key, which need almost no arithmetic.
HostCost host_cost(const verify::CaseSpec& spec, const Target& target);

}  // namespace flashcore::tool
