#include "check/check.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "verify/inputs/case_memory.h"
#include "verify/inputs/random.h"

namespace flashcore::verify {

CheckRunner::CheckRunner(const Backend& backend, Device device, const DeviceInfo& plan_for)
    : backend_(backend), device_(device) {
  this->plan_for(plan_for);
}

CheckRunner::~CheckRunner() {
  if (block_ != nullptr) backend_.release(block_, device_.index);
  for (void* data : {workspace_.data, gradient_workspace_.data}) {
    if (data != nullptr) backend_.release(data, device_.index);
  }
}

void CheckRunner::plan_for(const DeviceInfo& device) {
  plan_for_ = device;
  plan_for_.device = device_;
}

Status CheckRunner::reserve(void*& data, std::size_t& capacity, std::size_t bytes) {
  if (bytes <= capacity && data != nullptr) return {};
  if (data != nullptr) backend_.release(data, device_.index);
  data = nullptr;
  capacity = 0;
  const Result<void*> memory = backend_.allocate(bytes + bytes / 4, device_.index);
  if (!memory.ok()) return memory.status();
  data = *memory;
  capacity = bytes + bytes / 4;
  return {};
}

CheckRunner::Outcome CheckRunner::check(const CaseSpec& spec, double oracle_work,
                                        int oracle_threads, Stream stream) {
  Outcome outcome;
  const CaseMemory memory(spec);
  std::vector<std::byte> after(memory.bytes().size());
  Problem host_problem;
  outcome.status = [&]() -> Status {
    FLASHCORE_RETURN_IF_ERROR(reserve(block_, block_bytes_, memory.bytes().size()));
    tensors_ = memory.at(block_, device_);
    const Result<Problem> problem = make_problem(tensors_, memory.spec().options);
    if (!problem.ok()) return problem.status();
    host_problem = *problem;
    const Result<Plan> plan = make_plan(*problem, plan_for_);
    if (!plan.ok()) return plan.status();
    outcome.plan = *plan;
    outcome.facts = work_facts(*plan, memory.tensors());

    // A new workspace is filled with 0xff (NaN in every float format), then initialised once.
    const bool fresh = workspace_capacity_ < plan->workspace_bytes;
    FLASHCORE_RETURN_IF_ERROR(reserve(workspace_.data, workspace_capacity_, plan->workspace_bytes));
    workspace_.bytes = workspace_capacity_;
    workspace_.device = device_;
    if (fresh) {
      const std::vector<std::byte> ones(workspace_capacity_, std::byte{0xff});
      FLASHCORE_RETURN_IF_ERROR(
          backend_.upload(workspace_.data, ones.data(), ones.size(), device_.index));
      FLASHCORE_RETURN_IF_ERROR(workspace_init(workspace_, stream));
    }
    FLASHCORE_RETURN_IF_ERROR(
        backend_.upload(block_, memory.bytes().data(), memory.bytes().size(), device_.index));
    FLASHCORE_RETURN_IF_ERROR(run(*plan, tensors_, workspace_, stream));
    FLASHCORE_RETURN_IF_ERROR(workspace_status(workspace_, stream));
    return backend_.download(after.data(), block_, after.size(), device_.index);
  }();
  if (!outcome.status.ok()) return outcome;

  const Tensors result = memory.at(after.data(), Device{});
  outcome.stray_writes = !memory.only_outputs_changed(after);
  const Arithmetic arithmetic =
      arithmetic_of(host_problem.out.dtype, outcome.plan.kernel->probability_dtype);
  const reference::Oracle oracle =
      reference::compute(host_problem, memory.tensors(),
                         rows_to_check(host_problem, memory.tensors(), oracle_work, spec.seed),
                         {.cut_sums = arithmetic.truncates_sums}, oracle_threads);
  outcome.comparison = compare(oracle, host_problem, result, arithmetic);
  return outcome;
}

std::string CheckRunner::Outcome::failure() const {
  if (!status.ok()) return std::string(to_string(status.code())) + ": " + status.message();
  if (stray_writes) return "memory outside out and lse was written";
  return comparison.reason;
}

std::vector<reference::RowId> rows_to_check(const Problem& problem, const Tensors& tensors,
                                            double work, std::uint64_t seed) {
  std::vector<reference::RowId> rows = reference::all_rows(problem, tensors);
  const double per_row =
      static_cast<double>(problem.kv_len) * static_cast<double>(problem.head_dim + problem.v_dim);
  const auto affordable = static_cast<std::size_t>(std::max(work / std::max(per_row, 1.0), 64.0));
  if (rows.size() <= affordable) return rows;
  Random random(seed, 99);
  const double keep = static_cast<double>(affordable) / static_cast<double>(rows.size());
  const std::size_t last = rows.size() - 1;
  std::size_t index = 0;
  std::erase_if(rows, [&](const reference::RowId&) {
    const bool edge = index == 0 || index == last;
    ++index;
    return !edge && !random.chance(keep);
  });
  return rows;
}

}  // namespace flashcore::verify
