// Checks many problems on several threads and counts the results.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "check/check.h"
#include "check/coverage.h"
#include "cli/args.h"
#include "cli/signals.h"
#include "data/devices.h"

namespace flashcore::tool {

struct CheckRecord;
using Outcome = verify::CheckRunner::Outcome;

struct CheckProblem {
  verify::CaseSpec spec;   ///< options.kernel forces a kernel; null: the planner's choice
  std::size_t target = 0;  ///< index into the targets
  int blocks = 0;          ///< plan for a GPU with at most this many SMs; 0: all
};

/// A numbered set of problems. problem(i) is a pure function, so that an index replays a problem.
struct CheckSuite {
  std::string name;
  std::uint64_t count = 0;
  std::function<CheckProblem(std::uint64_t index)> problem;
  std::function<std::string(std::uint64_t index, const CheckProblem& problem)> replay;
  std::string summary;  ///< describes the problems, for people; may be empty
  bool large = false;   ///< one problem at a time on all threads; else one thread each
  double oracle_work = 1e9;
  /// Called for every outcome, never by two threads at once.
  std::function<void(std::uint64_t index, const CheckProblem& problem, const Outcome& outcome)>
      observe;
};

struct Failure {
  std::string suite;
  std::uint64_t index = 0;
  std::string kernel, problem, reason, replay;
  std::string comparison;  ///< as JSON; empty if the call itself failed
  std::string report;      ///< text of the comparison
  bool hung = false;       ///< it did not end, or its process crashed
};

struct KernelTally {
  std::int64_t problems = 0, failures = 0;
  double worst_ratio = 0;
  std::uint64_t worst_index = 0;
};

struct CheckTotals {
  std::int64_t problems = 0, failures = 0, planned = 0;
  std::map<std::string, KernelTally> kernels;                          ///< by id
  std::vector<Failure> reports;                                        ///< the first few
  std::optional<std::pair<std::string, std::uint64_t>> first_failure;  ///< suite and lowest index
};

class CheckEngine {
 public:
  CheckEngine(const CheckArgs& args, const std::vector<Target>& targets, verify::Coverage& coverage,
              const Stop& stop);

  /// Checks the problems of the suite, or the one of --index, until all are done or `stop` ends it.
  /// Calls on_failure, on the calling thread, for each failure that is reported in full.
  void check(const CheckSuite& suite, const std::function<void(const Failure&)>& on_failure);

  /// True if an earlier worker of this run has begun this suite.
  bool has_records(const CheckSuite& suite) const;

  const CheckTotals& totals() const { return totals_; }

 private:
  class Worker;
  struct Range {
    std::uint64_t begin, end;
  };

  Range range_of(const CheckSuite& suite) const;
  /// Counts an outcome. Returns the failure if it is to be reported.
  Failure* note(const CheckSuite& suite, std::uint64_t index, const CheckProblem& problem,
                const CheckRecord& record);
  /// Counts the outcomes of earlier workers of this run. Returns their indices.
  std::set<std::uint64_t> note_recorded(const CheckSuite& suite);
  void tell_begin(const CheckSuite& suite, std::uint64_t index, const CheckProblem& problem) const;
  bool enough() const;

  const CheckArgs& args_;
  const std::vector<Target>& targets_;
  verify::Coverage& coverage_;
  const Stop& stop_;
  int jobs_;
  CheckTotals totals_;
};

}  // namespace flashcore::tool
