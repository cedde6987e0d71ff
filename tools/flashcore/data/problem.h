// From the command line's sizes and options to a case.
#pragma once

#include <string>

#include "cli/args.h"
#include "flashcore/plan.h"
#include "flashcore/problem.h"
#include "verify/inputs/case.h"

namespace flashcore::tool {

/// Tensor options ("random" or a file) become "given". Throws CommandError for what makes no sense.
verify::CaseSpec spec_of(const ProblemArgs& args);

/// The options alone, which also apply to tensors from files.
Options options_of(const ProblemArgs& args);

/// Whether sizes are given at all.
bool gives_sizes(const ProblemArgs& args);

/// Its keys in shuffled pages of so many (0: as they are). Without used lengths they must be whole
/// pages: throws CommandError.
void put_in_pages(verify::CaseSpec& spec, std::int64_t page_size);

/// The problem of a case whose tensors need not exist: for planning any size.
Result<Problem> problem_of(const verify::CaseSpec& spec, Device device);

/// The kernel a case forces, or the one the planner takes for it; "(no plan)" where none does.
std::string kernel_of(const verify::CaseSpec& spec, const DeviceInfo& plan_for);

}  // namespace flashcore::tool
