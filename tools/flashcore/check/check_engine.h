// Running many checks on several threads and keeping count.
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

struct CheckItem {
  verify::CaseSpec
      spec;  ///< its options.kernel forces a kernel, or is null for the planner's choice
  std::size_t target = 0;
  int blocks = 0;  ///< planned for a GPU of so many SMs at most; 0: all of them
};

/// A numbered set of problems. item(i) is a pure function, so that a number replays a problem.
struct CheckSuite {
  std::string name;
  std::uint64_t count = 0;
  std::function<CheckItem(std::uint64_t index)> item;
  std::function<std::string(std::uint64_t index, const CheckItem& item)> replay;
  std::string summary;  ///< what the problems are, for people; may be empty
  bool large = false;   ///< one problem at a time, all threads on it; else one thread each
  double oracle_work = 1e9;
  /// Called for every outcome, never by two threads at once.
  std::function<void(std::uint64_t index, const CheckItem& item, const Outcome& outcome)> observe;
};

struct Failure {
  std::string suite;
  std::uint64_t index = 0;
  std::string kernel, problem, reason, replay;
  std::string comparison;  ///< as JSON; empty where the call itself failed
  std::string report;      ///< of the comparison, for people
  bool hung = false;       ///< it did not end, or ended its process
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

  /// Checks the suite's problems, or the one of --index, until all are done or `stop` says so.
  /// on_failure is called, on the calling thread, for each failure that is reported in full.
  void check(const CheckSuite& suite, const std::function<void(const Failure&)>& on_failure);

  /// Whether an earlier process of this run has begun this suite.
  bool has_records(const CheckSuite& suite) const;

  const CheckTotals& totals() const { return totals_; }

 private:
  class Worker;
  struct Range {
    std::uint64_t begin, end;
  };

  Range range_of(const CheckSuite& suite) const;
  /// Returns the failure if it is one to be reported.
  Failure* note(const CheckSuite& suite, std::uint64_t index, const CheckItem& item,
                const CheckRecord& record);
  /// Notes what earlier processes of this run have done; their indices.
  std::set<std::uint64_t> note_recorded(const CheckSuite& suite);
  void tell_begin(const CheckSuite& suite, std::uint64_t index, const CheckItem& item) const;
  bool enough() const;

  const CheckArgs& args_;
  const std::vector<Target>& targets_;
  verify::Coverage& coverage_;
  const Stop& stop_;
  int jobs_;
  CheckTotals totals_;
};

}  // namespace flashcore::tool
