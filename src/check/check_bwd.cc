// Checks gradients against the oracle.
#include <algorithm>
#include <vector>

#include "check/check.h"
#include "check/gradient_memory.h"
#include "core/error.h"
#include "verify/inputs/case_memory.h"
#include "verify/inputs/compare_bwd.h"

namespace flashcore::verify {
namespace {

constexpr int kOtherThreads = 3;

/// Writes the oracle's out and lse into the copy of a case at `base`. Returns the oracle.
reference::Oracle store_forward(const CaseMemory& memory, std::byte* base, const Problem& problem) {
  const Tensors t = memory.at(base, Device{});
  reference::Oracle o = reference::compute(problem, t, reference::all_rows(problem, t),
                                           reference::kPartsForGradients, 1);
  for (std::size_t r = 0; r < o.rows.size(); ++r) {
    const auto& [b, h, i] = o.rows[r];
    const std::int64_t q_row = reference::lengths_of(problem, t, b).q_row + i;
    const Layout& out = problem.out;
    for (std::int64_t c = 0; c < o.v_dim; ++c) {
      store(t.out.data, out.dtype, b * out.batch + h * out.head + q_row * out.row + c * out.column,
            o.out[r * static_cast<std::size_t>(o.v_dim) + static_cast<std::size_t>(c)]);
    }
    const Layout& lse = problem.lse;
    store(t.lse.data, lse.dtype, b * lse.batch + h * lse.head + q_row * lse.row, o.lse[r]);
  }
  return o;
}

}  // namespace

/// Fills the workspace of gradients and some memory behind it with NaN in every float format: no
/// kernel may read what it has not written.
Status CheckRunner::poison_workspace(std::size_t bytes) {
  Workspace& workspace = gradient_workspace_;
  FLASHCORE_RETURN_IF_ERROR(reserve(workspace.data, gradient_workspace_capacity_, bytes));
  workspace.bytes = gradient_workspace_capacity_;
  workspace.device = device_;
  const std::size_t poisoned = std::min(gradient_workspace_capacity_, bytes + bytes / 4);
  if (ones_.size() < poisoned) ones_.resize(poisoned, std::byte{0xff});
  return backend_.upload(workspace.data, ones_.data(), poisoned, device_.index);
}

/// Plans and runs the gradients twice and checks the second run against the first.
Status CheckRunner::run_gradients(const CaseMemory& memory, GradientMemory& gradients,
                                  Outcome& outcome, BackwardProblem& problem) {
  const std::size_t case_bytes = (memory.bytes().size() + 255) / 256 * 256;
  const std::size_t bytes = case_bytes + gradients.bytes().size();
  FLASHCORE_RETURN_IF_ERROR(reserve(block_, block_bytes_, bytes));
  auto* base = static_cast<std::byte*>(block_);
  tensors_ = memory.at(base, device_);
  const Gradients views = gradients.at(base + case_bytes, device_);
  const Result<BackwardProblem> made =
      make_backward_problem(tensors_, views, memory.spec().options);
  if (!made.ok()) return made.status();
  problem = *made;
  std::vector<std::byte> host = memory.bytes();
  const reference::Oracle oracle = store_forward(memory, host.data(), problem.forward);
  std::vector<std::byte> after(gradients.bytes().size()), again(after.size()), inputs(host.size());
  for (const bool first : {true, false}) {
    DeviceInfo device = plan_for_;
    if (!first) device.threads = kOtherThreads;
    const Result<BackwardPlan> plan = make_backward_plan(problem, device);
    if (!plan.ok()) return plan.status();
    if (first) {
      outcome.plan.problem = problem.forward;
      outcome.plan.device = device;
      outcome.plan.kernel = plan->kernel;
      outcome.plan.tile_q = plan->tile_q;
      outcome.plan.tile_k = plan->tile_k;
      outcome.plan.num_tiles = 1;
    }
    FLASHCORE_RETURN_IF_ERROR(poison_workspace(plan->workspace_bytes));
    FLASHCORE_RETURN_IF_ERROR(backend_.upload(block_, host.data(), host.size(), device_.index));
    FLASHCORE_RETURN_IF_ERROR(backend_.upload(base + case_bytes, gradients.bytes().data(),
                                              gradients.bytes().size(), device_.index));
    FLASHCORE_RETURN_IF_ERROR(run_backward(*plan, tensors_, views, gradient_workspace_));
    FLASHCORE_RETURN_IF_ERROR(backend_.download((first ? after : again).data(), base + case_bytes,
                                                after.size(), device_.index));
  }
  FLASHCORE_RETURN_IF_ERROR(backend_.download(inputs.data(), block_, inputs.size(), device_.index));
  if (!are_equal(after, again)) {
    return error(StatusCode::internal, "%d threads gave other bits than %d", kOtherThreads,
                 plan_for_.threads);
  }
  outcome.stray_writes = !are_equal(inputs, host) || !gradients.only_outputs_changed(after);
  const Tensors forward = memory.at(host.data(), Device{});
  const bool truncates =
      arithmetic_of(problem.forward.dtype, outcome.plan.kernel->probability_dtype).truncates_sums;
  const reference::GradientOracle expected = reference::compute_gradients(
      problem.forward, forward, gradients.gradients(),
      {problem.forward.dtype == DType::f64 ? 0x1p-52 : 0x1p-24, truncates}, oracle);
  outcome.comparison = compare_gradients(expected, gradients.at(after.data(), Device{}),
                                         outcome.plan.kernel->probability_dtype);
  return {};
}

CheckRunner::Outcome CheckRunner::check_backward(const CaseSpec& spec) {
  Outcome outcome;
  const CaseMemory memory(spec);
  GradientMemory gradients(memory.spec(), memory.tensors());
  BackwardProblem problem;
  outcome.status = run_gradients(memory, gradients, outcome, problem);
  return outcome;
}

}  // namespace flashcore::verify
