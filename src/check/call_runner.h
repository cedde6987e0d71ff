// Runs calls on one kernel of one device. Returns the outputs and, with split-KV, the partial
// results in the workspace.
#pragma once

#include <cstddef>
#include <vector>

#include "backend/backend.h"
#include "verify/inputs/call.h"

namespace flashcore::verify {

/// Partial results of a plan with KV splits: out [splits, rows, v_dim] and lse [splits, rows]. A
/// row is (batch, head, query), or (head, row of the varlen q).
struct Partials {
  DType dtype = DType::f32;
  std::int64_t splits = 0, rows = 0, v_dim = 0;
  std::vector<std::byte> out, lse;

  Partials() = default;
  /// Fills both arrays with poison.
  explicit Partials(const Plan& plan);
  /// Index of a row of split `split`. `q_row` is the row within q's sequence dimension (varlen:
  /// counted over all sequences).
  std::int64_t row_of(const Problem& problem, std::int64_t split, std::int64_t b, std::int64_t h,
                      std::int64_t q_row) const;
};

struct RanCall {
  Problem problem;
  Plan plan;
  HostCall after;     ///< the call with its outputs
  Partials partials;  ///< splits is 0 if the plan has one split
};

class CallRunner {
 public:
  /// Plans for `plan_for` and runs on `device`. If `kernel` is null, the planner chooses one for
  /// every call.
  CallRunner(const Backend& backend, Device device, const DeviceInfo& plan_for, const char* kernel);
  ~CallRunner();
  CallRunner(const CallRunner&) = delete;
  CallRunner& operator=(const CallRunner&) = delete;

  /// Fixes the kernel of all later calls to the planner's choice for this call.
  Status keep_kernel_of(const HostCall& call);

  /// Plans the call without running it.
  Result<Plan> plan(const HostCall& call);
  Result<RanCall> run(const HostCall& call);
  /// Runs only the combine step, on the given partial results.
  Result<RanCall> combine(const HostCall& call, const Partials& partials);

 private:
  /// Plans the call, allocates device memory, uploads the call and poisons the partial results.
  Status prepare(const HostCall& call, RanCall& ran);
  Status upload_partials(const RanCall& ran);
  Status collect(RanCall& ran);
  Status reserve(void*& data, std::size_t& capacity, std::size_t bytes);

  const Backend& backend_;
  Device device_;
  DeviceInfo plan_for_;
  const char* kernel_;
  Tensors tensors_;        ///< the prepared call, on the device
  void* block_ = nullptr;  ///< memory of all its tensors
  std::size_t block_bytes_ = 0;
  Workspace workspace_;
  std::size_t workspace_capacity_ = 0;
};

}  // namespace flashcore::verify
