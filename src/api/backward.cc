// The pipeline of gradients: validate, plan (plan/backward.cc), launch.
#include "flashcore/backward.h"

#include "api/guarded.h"
#include "api/validate/backward.h"
#include "backend/backend.h"
#include "backend/params.h"
#include "core/error.h"

namespace flashcore {

Result<BackwardProblem> make_backward_problem(const Tensors& tensors, const Gradients& gradients,
                                              const Options& options) noexcept {
  Result<BackwardProblem> problem(std::in_place);
  Status status = describe_backward(tensors, gradients, options, *problem);
  if (status.ok()) status = check_backward_memory(tensors, gradients);
  if (!status.ok()) problem = std::move(status);
  return problem;
}

Status run_backward(const BackwardPlan& plan, const Tensors& tensors, const Gradients& gradients,
                    Workspace workspace, Stream stream, const std::int32_t* cancel) noexcept {
  return guarded([&]() -> Status {
    if (plan.kernel == nullptr) return invalid_argument("plan: is empty; use make_backward_plan()");
    const Problem& planned = plan.problem.forward;
    BackwardProblem given;
    FLASHCORE_RETURN_IF_ERROR(describe_backward(tensors, gradients, planned.options, given));
    FLASHCORE_RETURN_IF_ERROR(check_backward_memory(tensors, gradients));
    FLASHCORE_RETURN_IF_ERROR(check_against_backward_plan(plan.problem, given));
    FLASHCORE_RETURN_IF_ERROR(check_workspace(workspace, plan.workspace_bytes));
    FLASHCORE_RETURN_IF_ERROR(check_workspace_device(workspace, planned.device, "q"));
    if (workspace.header != nullptr && planned.device.type == DeviceType::cpu) {
      return invalid_argument(
          "workspace: has a separate header, which only GPU calls support; leave "
          "Workspace::header null");
    }
    const Result<const Backend*> backend = backend_for(plan.kernel->device);
    if (!backend.ok()) return backend.status();
    FLASHCORE_RETURN_IF_ERROR(check_cancel(cancel));
    return (*backend)->launch_backward(
        plan, make_backward_params(plan, tensors, gradients, workspace), stream, cancel);
  });
}

}  // namespace flashcore
