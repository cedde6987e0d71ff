// Runs a case on a kernel and compares the result with the oracle. All tools and tests use it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "check/work_facts.h"
#include "verify/inputs/case.h"
#include "verify/inputs/compare.h"

namespace flashcore::verify {

class CaseMemory;
class GradientMemory;

/// Owns the device memory of one case and reuses it for the next. Not thread-safe.
class CheckRunner {
 public:
  /// Plans for `plan_for` and runs on `device`.
  CheckRunner(const Backend& backend, Device device, const DeviceInfo& plan_for);
  ~CheckRunner();
  CheckRunner(const CheckRunner&) = delete;
  CheckRunner& operator=(const CheckRunner&) = delete;

  struct Outcome {
    Status status;              ///< first error of any library call
    Comparison comparison;      ///< valid only if status is ok
    bool stray_writes = false;  ///< the kernel wrote memory outside out and lse
    Plan plan;
    WorkFacts facts;  ///< from the plan and this case's lengths
    bool passed() const { return status.ok() && comparison.ok && !stray_writes; }
    std::string failure() const;  ///< one line; empty if passed
  };

  /// Plans later cases for another device.
  void plan_for(const DeviceInfo& device);

  /// Builds the case, runs it and compares. The oracle computes the rows of rows_to_check() for
  /// `oracle_work` multiply-adds.
  Outcome check(const CaseSpec& spec, double oracle_work = 1e9, int oracle_threads = 1,
                Stream stream = nullptr);

  /// The same for the gradients of the case. out and lse are the oracle's; the gradients are
  /// computed twice, with another number of threads the second time.
  Outcome check_backward(const CaseSpec& spec);

  /// The case of the last check(), still in device memory. Timing runs it again.
  const Tensors& tensors() const { return tensors_; }
  Workspace workspace() const { return workspace_; }

 private:
  Status run_gradients(const CaseMemory& memory, GradientMemory& gradients, Outcome& outcome,
                       BackwardProblem& problem);
  Status poison_workspace(std::size_t bytes);
  Status reserve(void*& data, std::size_t& capacity, std::size_t bytes);

  const Backend& backend_;
  Device device_;
  DeviceInfo plan_for_;
  Tensors tensors_;
  Workspace workspace_;
  void* block_ = nullptr;
  std::size_t block_bytes_ = 0;
  std::size_t workspace_capacity_ = 0;
  Workspace gradient_workspace_;  ///< without the header that workspace_ has between calls
  std::size_t gradient_workspace_capacity_ = 0;
  std::vector<std::byte> ones_;  ///< the poison of a workspace
};

/// All rows if they are at most 64 or need at most `work` multiply-adds. Otherwise a random sample
/// of about that size, with the first and the last row.
std::vector<reference::RowId> rows_to_check(const Problem& problem, const Tensors& tensors,
                                            double work, std::uint64_t seed);

}  // namespace flashcore::verify
