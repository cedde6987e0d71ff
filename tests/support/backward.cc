#include "support/backward.h"

#include "cpu/cpu_info.h"
#include "verify/inputs/case_memory.h"
#include "verify/inputs/compare_bwd.h"

namespace flashcore::test {
namespace {

Tensor poisoned_like(const Tensor& tensor, DType dtype = DType::none) {
  if (!tensor.given()) return {};
  Tensor made(dtype == DType::none ? tensor.dtype() : dtype, tensor.shape());
  made.fill_bits(verify::poison(made.dtype()));
  return made;
}

}  // namespace

std::vector<const KernelInfo*> runnable_backward_kernels() {
  std::vector<const KernelInfo*> found;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.op == Operation::bwd && kernel.device == DeviceType::cpu && kernel.compiled &&
        cpu::isa_available(kernel.isa)) {
      found.push_back(&kernel);
    }
  }
  return found;
}

Gradients Differentiated::gradients() const {
  return {.dout = dout.view(),
          .dlse = dlse.view(),
          .dq = dq.view(),
          .dk = dk.view(),
          .dv = dv.view(),
          .dbias = dbias.view(),
          .dsinks = dsinks.view()};
}

Differentiated draw_gradients(Random& random, Inputs inputs, bool with_dlse) {
  Differentiated call;
  Output output = attend(inputs);
  EXPECT_TRUE(output.status.ok()) << output.status.message();
  call.out = std::move(output.out);
  call.lse = std::move(output.lse);
  call.dout = draw_normal(random, call.out.dtype(), call.out.shape());
  if (with_dlse) call.dlse = draw_normal(random, call.lse.dtype(), call.lse.shape());
  call.dq = poisoned_like(inputs.q);
  call.dk = poisoned_like(inputs.k);
  call.dv = poisoned_like(inputs.v);
  call.dbias = poisoned_like(inputs.bias);
  call.dsinks = poisoned_like(inputs.sinks);
  call.inputs = std::move(inputs);
  call.inputs.options.kernel = nullptr;
  call.inputs.options.num_splits = 0;
  return call;
}

Status differentiate(Differentiated& call, const char* kernel, int threads) {
  Options options = call.inputs.options;
  options.kernel = kernel;
  const Tensors tensors = call.tensors();
  const Gradients gradients = call.gradients();
  const Result<BackwardProblem> problem = make_backward_problem(tensors, gradients, options);
  if (!problem.ok()) return problem.status();
  DeviceInfo device = *device_info({});
  if (threads > 0) device.threads = threads;
  const Result<BackwardPlan> plan = make_backward_plan(*problem, device);
  if (!plan.ok()) return plan.status();
  const WorkspaceMemory workspace(workspace_bytes(*plan));
  return run_backward(*plan, tensors, gradients, workspace.get());
}

std::string gradient_verdict(const Differentiated& call) {
  const Tensors tensors = call.tensors();
  const Result<Problem> problem = make_problem(tensors, call.inputs.options);
  if (!problem.ok()) return problem.status().message();
  const bool f64 = problem->dtype == DType::f64;
  const reference::GradientOracle oracle = reference::compute_gradients(
      *problem, tensors, call.gradients(), {f64 ? 0x1p-52 : 0x1p-24, false});
  const verify::Comparison comparison =
      verify::compare_gradients(oracle, call.gradients(), f64 ? DType::f64 : DType::f32);
  return comparison.ok ? "" : verify::report(comparison);
}

std::string gradient_difference(const Differentiated& a, const Differentiated& b) {
  static constexpr struct {
    const char* name;
    Tensor Differentiated::*tensor;
  } kAll[] = {{"dq", &Differentiated::dq},
              {"dk", &Differentiated::dk},
              {"dv", &Differentiated::dv},
              {"dbias", &Differentiated::dbias},
              {"dsinks", &Differentiated::dsinks}};
  for (const auto& [name, tensor] : kAll) {
    if (!(a.*tensor).given()) continue;
    const std::string text = difference(a.*tensor, b.*tensor);
    if (!text.empty()) return std::string(name) + ": " + text;
  }
  return "";
}

}  // namespace flashcore::test
