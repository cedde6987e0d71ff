// The suites of `flashcore check`: random problems, every tuning row, named cases.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check/check_engine.h"
#include "data/cases.h"

namespace flashcore::tool {

/// Random problems that favour tile edges, round robin over the kernels.
CheckSuite random_suite(const CheckArgs& args, const std::vector<RunnableKernel>& kernels);

/// CTA limit of problem `index`, an entry of --blocks that depends on seed and index only. Without
/// --blocks, persistent kernels also get few CTAs, because small problems give each CTA one tile.
int blocks_of(const CheckArgs& args, std::uint64_t index, bool persistent);

/// Every kernel at every size class of its tuning, with the dims at both ends of the class and
/// several numbers of splits, even if the planner would choose another kernel.
CheckSuite tuning_suite(const CheckArgs& args, const std::vector<RunnableKernel>& kernels);

/// Problems with query tiles that see no key, several per CTA, in every dtype, on every GPU kernel
/// that supports them, and on the CPU kernel that the planner chooses.
inline constexpr const char* kKeylessTiles = "keyless-tiles";
CheckSuite keyless_tiles_suite(const CheckArgs& args, const std::vector<Target>& targets);

/// A suite from a list. Its replay command repeats the options of this run.
CheckSuite list_suite(const CheckArgs& args, const std::string& name,
                      const std::shared_ptr<const std::vector<CheckProblem>>& problems);

/// Work limit of the oracle for large cases.
inline constexpr double kCaseOracleWork = 2e8;

/// Name of the suite of cases selected by --case alone.
inline constexpr const char* kNamedCases = "cases";

/// Results of a suite of cases, one row per case and device.
struct CaseRow {
  BenchCase bench_case;
  std::string device;
  std::string skipped;                   ///< why it was skipped; empty: it ran
  std::vector<std::string> dtypes;       ///< in the order tried
  std::map<std::string, double> errors;  ///< largest by dtype; NaN if a result is missing
  double worst_ratio = 0;
  int most_splits = 0;
  std::int64_t problems = 0, failures = 0;
};

struct CaseSuite {
  CheckSuite suite;
  std::vector<CaseRow> rows;  ///< filled in while the suite runs
};

/// Cases of the file. Suite regression runs in f16, bf16 and f32, and its Split-K cases with every
/// number of splits. The result must not move while the suite runs.
std::unique_ptr<CaseSuite> case_suite(const CheckArgs& args, const std::vector<Target>& targets,
                                      const std::vector<BenchCase>& cases, const std::string& name);

}  // namespace flashcore::tool
