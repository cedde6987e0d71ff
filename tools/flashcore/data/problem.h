// Converts the sizes and options of a command line to a case.
#pragma once

#include <string>

#include "cli/args.h"
#include "flashcore/plan.h"
#include "flashcore/problem.h"
#include "verify/inputs/case.h"

namespace flashcore::tool {

/// The case of random data. Throws CommandError for invalid arguments and for tensors from files.
verify::CaseSpec spec_of(const ProblemArgs& args);

/// The options, which also apply to tensors from files.
Options options_of(const ProblemArgs& args);

/// True if any size is given.
bool gives_sizes(const ProblemArgs& args);

/// Puts K and V into shuffled pages of `page_size` keys (0: no pages). Throws CommandError if
/// kv_len is not a multiple of it and there are no used lengths.
void put_in_pages(verify::CaseSpec& spec, std::int64_t page_size);

/// The problem of a case without its tensors, so that any size can be planned.
Result<Problem> problem_of(const verify::CaseSpec& spec, Device device);

/// The kernel that the case forces or the planner chooses; "(no plan)" if there is none.
std::string kernel_of(const verify::CaseSpec& spec, const DeviceInfo& plan_for);

}  // namespace flashcore::tool
