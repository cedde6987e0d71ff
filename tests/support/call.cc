#include "support/call.h"

#include <cstring>
#include <new>
#include <utility>

#include "cpu/cpu_info.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::test {

std::vector<const KernelInfo*> runnable_kernels() {
  std::vector<const KernelInfo*> found;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.op == Operation::fwd && kernel.device == DeviceType::cpu && kernel.compiled &&
        cpu::isa_available(kernel.isa)) {
      found.push_back(&kernel);
    }
  }
  return found;
}

DType wide(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

Output make_output(const Inputs& inputs, const Setting& setting) {
  Output output;
  Shape shape = inputs.q.shape();
  shape.back() = inputs.v.shape().back();
  DType dtype = setting.out;
  if (dtype == DType::none) {
    dtype = inputs.options.partial ? wide(inputs.q.dtype()) : inputs.q.dtype();
  }
  output.out = Tensor(dtype, shape, setting.out_layout);
  output.out.fill_bits(verify::poison(dtype));
  shape.pop_back();
  if (inputs.cu_seqlens_q.given()) std::swap(shape[0], shape[1]);  // [q_heads, total_q]
  output.lse = Tensor(wide(inputs.q.dtype()), shape);
  output.lse.fill_bits(verify::poison(output.lse.dtype()));
  return output;
}

Tensors tensors_of(const Inputs& inputs, const Tensor& out, const Tensor& lse) {
  return {.q = inputs.q.view(),
          .k = inputs.k.view(),
          .v = inputs.v.view(),
          .out = out.view(),
          .lse = lse.view(),
          .bias = inputs.bias.view(),
          .mask = inputs.mask.view(),
          .alibi_slopes = inputs.alibi_slopes.view(),
          .sinks = inputs.sinks.view(),
          .cu_seqlens_q = inputs.cu_seqlens_q.view(),
          .cu_seqlens_k = inputs.cu_seqlens_k.view(),
          .seqused_k = inputs.used_k.view(),
          .block_table = inputs.block_table.view(),
          .q_start = inputs.q_start.view(),
          .k_start = inputs.k_start.view(),
          .mask_blocks = inputs.mask_blocks.view(),
          .mask_bits = inputs.mask_bits.view()};
}

WorkspaceMemory::WorkspaceMemory(std::size_t bytes) {
  workspace_ = {::operator new (bytes, std::align_val_t{256}), bytes, Device{}};
  std::memset(workspace_.data, 0xff, bytes);
  if (bytes >= kWorkspaceHeaderBytes) static_cast<void>(workspace_init(workspace_));
}

WorkspaceMemory::~WorkspaceMemory() { ::operator delete (workspace_.data, std::align_val_t{256}); }

Output attend(const Inputs& inputs, const Setting& setting) {
  Output output = make_output(inputs, setting);
  const Tensors tensors = tensors_of(inputs, output.out, output.lse);
  output.status = [&]() -> Status {
    const Result<Problem> problem = make_problem(tensors, inputs.options);
    if (!problem.ok()) return problem.status();
    output.problem = *problem;
    Result<DeviceInfo> device = device_info(Device{});
    if (!device.ok()) return device.status();
    DeviceInfo info = *device;
    if (setting.threads > 0) info.threads = setting.threads;
    const Result<Plan> plan = make_plan(*problem, info);
    if (!plan.ok()) return plan.status();
    output.plan = *plan;
    WorkspaceMemory workspace(workspace_bytes(*plan));
    return run(*plan, tensors, workspace.get());
  }();
  return output;
}

std::vector<double> out_bounds(const Inputs& inputs, const Output& output) {
  const Tensors tensors = tensors_of(inputs, output.out, output.lse);
  const reference::Oracle oracle = reference::compute(
      output.problem, tensors, reference::all_rows(output.problem, tensors), false, 1);
  const verify::Arithmetic arithmetic =
      verify::arithmetic_of(output.problem.out.dtype, output.plan.kernel->probability_dtype);
  std::vector<double> bounds;
  for (std::size_t r = 0; r < oracle.rows.size(); ++r) {
    for (std::int64_t c = 0; c < oracle.v_dim; ++c) {
      bounds.push_back(verify::out_bound(oracle, r, static_cast<std::size_t>(c), arithmetic));
    }
  }
  return bounds;
}

std::string verdict(const Inputs& inputs, const Output& output) {
  if (!output.status.ok()) return output.status.message();
  const Tensors tensors = tensors_of(inputs, output.out, output.lse);
  const reference::Oracle oracle = reference::compute(
      output.problem, tensors, reference::all_rows(output.problem, tensors), false, 1);
  const verify::Comparison comparison = verify::compare(
      oracle, output.problem, tensors,
      verify::arithmetic_of(output.problem.out.dtype, output.plan.kernel->probability_dtype));
  return comparison.ok ? "" : verify::report(comparison);
}

}  // namespace flashcore::test
