// The pipeline: validate (validate/problem.cc), plan (plan/planner.cc), launch, combine.
#include "flashcore/attention.h"

#include "api/guarded.h"
#include "api/validate/problem.h"
#include "backend/backend.h"
#include "backend/params.h"
#include "core/error.h"

namespace flashcore {
namespace {

bool is_empty(const Problem& p) noexcept { return p.batch == 0 || p.q_heads == 0 || p.q_len == 0; }

Status check_run_workspace(const Workspace& workspace, const Plan& plan) noexcept {
  FLASHCORE_RETURN_IF_ERROR(check_workspace(workspace, plan.workspace_bytes));
  FLASHCORE_RETURN_IF_ERROR(check_workspace_device(workspace, plan.problem.device, "q"));
  if (workspace.header != nullptr && plan.problem.device.type == DeviceType::cpu) {
    return invalid_argument(
        "workspace: has a separate header, which only GPU calls support; leave Workspace::header "
        "null");
  }
  return {};
}

}  // namespace

Result<Problem> make_problem(const Tensors& tensors, const Options& options) noexcept {
  Problem problem;
  FLASHCORE_RETURN_IF_ERROR(describe(tensors, options, problem));
  FLASHCORE_RETURN_IF_ERROR(check_memory(tensors));
  return problem;
}

Result<Problem> dense_problem(DType dtype, std::int64_t batch, std::int64_t q_heads,
                              std::int64_t kv_heads, std::int64_t q_len, std::int64_t kv_len,
                              std::int64_t head_dim, std::int64_t v_dim, const Options& options,
                              Device device) noexcept {
  const DType narrow = is_8bit(dtype) ? DType::f16 : dtype;
  const DType out = !options.partial ? narrow : dtype == DType::f64 ? DType::f64 : DType::f32;
  Tensors tensors{.q = view(nullptr, dtype, {batch, q_heads, q_len, head_dim}, device),
                  .k = view(nullptr, dtype, {batch, kv_heads, kv_len, head_dim}, device),
                  .v = view(nullptr, dtype, {batch, kv_heads, kv_len, v_dim}, device),
                  .out = view(nullptr, out, {batch, q_heads, q_len, v_dim}, device)};
  if (options.partial) tensors.lse = view(nullptr, out, {batch, q_heads, q_len}, device);
  Problem problem;
  FLASHCORE_RETURN_IF_ERROR(describe(tensors, options, problem));
  return problem;
}

Status run(const Plan& plan, const Tensors& tensors, Workspace workspace, Stream stream,
           const std::int32_t* cancel) noexcept {
  return guarded([&]() -> Status {
    // 1. Check the tensors against the plan.
    if (plan.kernel == nullptr) return invalid_argument("plan: is empty; use make_plan()");
    Problem given;
    FLASHCORE_RETURN_IF_ERROR(describe(tensors, plan.problem.options, given));
    FLASHCORE_RETURN_IF_ERROR(check_memory(tensors));
    FLASHCORE_RETURN_IF_ERROR(check_against_plan(plan.problem, given));
    if (is_empty(plan.problem)) return {};
    FLASHCORE_RETURN_IF_ERROR(check_run_workspace(workspace, plan));

    // 2. Launch the kernel. It computes the result, or one partial result per split.
    const Result<const Backend*> backend = backend_for(plan.kernel->device);
    if (!backend.ok()) return backend.status();
    const core::AttentionParams params = make_params(plan, tensors, workspace);
    FLASHCORE_RETURN_IF_ERROR(check_cancel(cancel));
    FLASHCORE_RETURN_IF_ERROR((*backend)->launch(plan, params, stream, cancel));

    // 3. Combine the splits, unless the kernel combines them itself.
    if (plan.combine != CombineMode::kernel) return {};
    FLASHCORE_RETURN_IF_ERROR(check_cancel(cancel));
    return (*backend)->combine(make_combine_params(plan, params), plan.problem.dtype,
                               plan.problem.device, plan.device.threads, stream, cancel);
  });
}

Status workspace_init(Workspace workspace, Stream stream) noexcept {
  return guarded([&]() -> Status {
    FLASHCORE_RETURN_IF_ERROR(check_workspace(workspace, kWorkspaceHeaderBytes));
    const Result<const Backend*> backend = backend_for(workspace.device.type);
    if (!backend.ok()) return backend.status();
    return (*backend)->zero(header_of(workspace), kWorkspaceHeaderBytes, workspace.device, stream);
  });
}

Result<std::uint64_t> capture_id(Device device, Stream stream, std::int32_t* graph_ended) noexcept {
  std::uint64_t id = 0;
  const Status status = guarded([&]() -> Status {
    const Result<const Backend*> backend = backend_for(device.type);
    if (!backend.ok()) return backend.status();
    const Result<std::uint64_t> found = (*backend)->capture_id(device, stream, graph_ended);
    if (!found.ok()) return found.status();
    id = *found;
    return {};
  });
  if (!status.ok()) return status;
  return id;
}

Status workspace_status(Workspace workspace, Stream stream) noexcept {
  return guarded([&]() -> Status {
    FLASHCORE_RETURN_IF_ERROR(check_workspace(workspace, kWorkspaceHeaderBytes));
    const Result<const Backend*> backend = backend_for(workspace.device.type);
    if (!backend.ok()) return backend.status();
    auto* slot = static_cast<core::ErrorSlot*>(header_of(workspace));
    core::ErrorSlot found{};
    FLASHCORE_RETURN_IF_ERROR((*backend)->read_error(slot, &found, workspace.device, stream));
    if (found.code == 0) return {};
    FLASHCORE_RETURN_IF_ERROR((*backend)->zero(slot, sizeof *slot, workspace.device, stream));
    return describe_error(found);
  });
}

}  // namespace flashcore
