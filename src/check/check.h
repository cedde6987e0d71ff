// Running a case on a kernel and judging the result: the one way the tools and tests do it.
#pragma once

#include <string>

#include "backend/backend.h"
#include "check/work_facts.h"
#include "verify/inputs/case.h"
#include "verify/inputs/compare.h"

namespace flashcore::verify {

/// Memory for one case at a time on one device, reused from case to case. Not for several threads.
class CheckRunner {
 public:
  /// `plan_for` is the device the planner is told of; the kernels run on `device`.
  CheckRunner(const Backend& backend, Device device, const DeviceInfo& plan_for);
  ~CheckRunner();
  CheckRunner(const CheckRunner&) = delete;
  CheckRunner& operator=(const CheckRunner&) = delete;

  struct Outcome {
    Status status;          ///< of the calls
    Comparison comparison;  ///< meaningful where status is ok
    bool stray_writes = false;
    Plan plan;
    WorkFacts facts;  ///< of the plan and this case's lengths
    bool passed() const { return status.ok() && comparison.ok && !stray_writes; }
    std::string failure() const;  ///< one line; empty where passed
  };

  /// From now on the planner is told of another device.
  void plan_for(const DeviceInfo& device);

  /// Builds the case, runs it and compares. The oracle computes all rows up to `oracle_work`
  /// multiply-adds, beyond that a sample of rows that always has the first and the last.
  Outcome check(const CaseSpec& spec, double oracle_work = 1e9, int oracle_threads = 1,
                Stream stream = nullptr);

  /// As check(), and leaves the case in memory, ready to be run again (for timing).
  const Tensors& tensors() const { return tensors_; }
  Workspace workspace() const { return workspace_; }

 private:
  Status reserve(void*& data, std::size_t& capacity, std::size_t bytes);

  const Backend& backend_;
  Device device_;
  DeviceInfo plan_for_;
  Tensors tensors_;
  Workspace workspace_;
  void* block_ = nullptr;
  std::size_t block_bytes_ = 0;
  std::size_t workspace_capacity_ = 0;
};

/// Rows to check: all of them while rows * kv_len * dims stays below `work`, else a sample.
std::vector<reference::RowId> rows_to_check(const Problem& problem, const Tensors& tensors,
                                            double work, std::uint64_t seed);

}  // namespace flashcore::verify
