// flashcore run --stage and --trace: checks the stages of a kernel instead of its result.
#pragma once

#include <string>

#include "cli/args.h"
#include "cli/json_output.h"
#include "data/devices.h"
#include "data/host_case.h"

namespace flashcore::tool {

inline bool inspects(const RunArgs& args) { return !args.stage.empty() || !args.trace.empty(); }

struct Inspection {  // NOLINT(bugprone-exception-escape): moving Json does not throw
  bool passed = true;
  std::string text;
  Json json;
};

/// Inspects the given kernel, or the planner's choice if null. Throws CommandError if a stage that
/// was requested by name cannot be read.
Inspection inspect(const RunArgs& args, const HostCase& host, const KernelInfo* kernel,
                   const Target& target);

}  // namespace flashcore::tool
