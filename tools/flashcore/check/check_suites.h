// The problems `flashcore check` goes through: random ones, every tuning row, named cases.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check/check_engine.h"
#include "data/cases.h"

namespace flashcore::tool {

/// Random boundary-biased problems, taking the kernels in turn.
CheckSuite random_suite(const CheckArgs& args, const std::vector<RunnableKernel>& kernels);

/// Of problem `index`, by seed and index alone: an entry of --blocks. Where that is not given,
/// persistent kernels have few blocks too, since small problems give many blocks an item each.
int blocks_of(const CheckArgs& args, std::uint64_t index, bool persistent);

/// Every kernel at every size class of its tuning, with the dims at both ends of the class and
/// several numbers of splits, whether or not the planner would choose it there.
CheckSuite tuning_suite(const CheckArgs& args, const std::vector<RunnableKernel>& kernels);

/// The problems of bugs that were found late, in every type, on every kernel that takes them; of
/// CPU kernels on the one the planner chooses, since they are large.
CheckSuite regression_suite(const CheckArgs& args, const std::vector<Target>& targets);

/// A suite that is a list. Its replay repeats the options the list was made with.
CheckSuite list_suite(const CheckArgs& args, const std::string& name,
                      const std::shared_ptr<const std::vector<CheckItem>>& items);

/// What the oracle may do for a case of a list of large ones.
inline constexpr double kCaseOracleWork = 2e8;

/// The name of a suite of cases that --case alone selects.
inline constexpr const char* kNamedCases = "cases";

/// What a suite of cases found, one row per case and device.
struct CaseRow {
  BenchCase bench_case;
  std::string device;
  std::string skipped;                   ///< why nothing was run
  std::vector<std::string> dtypes;       ///< in the order tried
  std::map<std::string, double> errors;  ///< by dtype: the largest, NaN where one is missing
  double worst_ratio = 0;
  int most_splits = 0;
  std::int64_t problems = 0, failures = 0;
};

struct CaseSuite {
  CheckSuite suite;
  std::vector<CaseRow> rows;  ///< filled in while the suite runs
};

/// Cases of the file. Those of the suite "lineage" are tried in f16, bf16 and f32, and its Split-K
/// part with every number of splits. The result must stay where it is while the suite runs.
std::unique_ptr<CaseSuite> case_suite(const CheckArgs& args, const std::vector<Target>& targets,
                                      const std::vector<BenchCase>& cases, const std::string& name);

}  // namespace flashcore::tool
