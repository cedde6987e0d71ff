// What `flashcore check` says of its results, to people and to programs.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "check/check_suites.h"

namespace flashcore::tool {

using Json = nlohmann::ordered_json;

void print_failure(const Failure& failure);
/// Per kernel, in the order of the registry: problems, failures, worst error.
std::string kernel_table(const CheckTotals& totals);
void print_coverage(const verify::Coverage& coverage);
/// The lineage: what the ancestor's kernels did at these shapes, and what these do.
void print_lineage(const std::vector<CaseRow>& rows);
void print_cases(const std::vector<CaseRow>& rows);

Json to_json(const Failure& failure);
Json to_json(const verify::Coverage& coverage);
Json to_json(const CaseRow& row);

/// What --require-coverage finds lacking; empty: nothing.
std::string lacking(const verify::Coverage& coverage, std::int64_t per_kernel);

}  // namespace flashcore::tool
