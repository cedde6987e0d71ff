// Reports of `flashcore check`, as text and JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "check/check_suites.h"

namespace flashcore::tool {

using Json = nlohmann::ordered_json;

void print_failure(const Failure& failure);
/// Per kernel, in registry order: problems, failures, worst error.
std::string kernel_table(const CheckTotals& totals);
void print_coverage(const verify::Coverage& coverage);
/// Suite regression: errors of earlier kernels and of this build at the same shapes.
void print_regression(const std::vector<CaseRow>& rows);
void print_cases(const std::vector<CaseRow>& rows);

Json to_json(const Failure& failure);
Json to_json(const verify::Coverage& coverage);
Json to_json(const CaseRow& row);

/// The coverage that --require-coverage demands and the run lacks; empty: none.
std::string missing_coverage(const verify::Coverage& coverage, std::int64_t per_kernel);

}  // namespace flashcore::tool
