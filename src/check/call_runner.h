// Runs calls on one kernel of one device and brings back everything they left: the outputs, and
// where keys are split the partial results in the workspace.
#pragma once

#include <cstddef>
#include <vector>

#include "backend/backend.h"
#include "verify/inputs/call.h"

namespace flashcore::verify {

/// The partial results of a split plan, [splits, rows, v_dim] and [splits, rows]; rows are
/// (batch, head, query) or, packed, (head, packed query).
struct Partials {
  DType dtype = DType::f32;
  std::int64_t splits = 0, rows = 0, v_dim = 0;
  std::vector<std::byte> out, lse;

  Partials() = default;
  /// Poisoned.
  explicit Partials(const Plan& plan);
  /// Where split `split` of a row lies; `packed_row` counts from the first row of a packed q.
  std::int64_t row_of(const Problem& problem, std::int64_t split, std::int64_t b, std::int64_t h,
                      std::int64_t packed_row) const;
};

struct RanCall {
  Problem problem;
  Plan plan;
  HostCall after;     ///< the call with its outputs
  Partials partials;  ///< splits is 0 where the plan has one key range
};

class CallRunner {
 public:
  /// `plan_for` is the device the planner is told of; the kernel runs on `device`. A null `kernel`
  /// is whichever the planner takes for each call.
  CallRunner(const Backend& backend, Device device, const DeviceInfo& plan_for, const char* kernel);
  ~CallRunner();
  CallRunner(const CallRunner&) = delete;
  CallRunner& operator=(const CallRunner&) = delete;

  /// From here on always the kernel the planner takes for this call.
  Status keep_kernel_of(const HostCall& call);

  /// The plan alone.
  Result<Plan> plan(const HostCall& call);
  Result<RanCall> run(const HostCall& call);
  /// Only the step that joins partial results, on these.
  Result<RanCall> combine(const HostCall& call, const Partials& partials);

 private:
  /// Makes room on the device, uploads the call and the partial results, plans.
  Status prepare(const HostCall& call, RanCall& ran);
  Status upload_partials(const RanCall& ran);
  Status collect(RanCall& ran);
  Status reserve(void*& data, std::size_t& capacity, std::size_t bytes);

  const Backend& backend_;
  Device device_;
  DeviceInfo plan_for_;
  const char* kernel_;
  Tensors tensors_;  ///< of the call prepared, on the device
  void* block_ = nullptr;
  std::size_t block_bytes_ = 0;
  Workspace workspace_;
  std::size_t workspace_capacity_ = 0;
};

}  // namespace flashcore::verify
