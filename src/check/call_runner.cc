#include "check/call_runner.h"

#include <cstring>

#include "backend/params.h"
#include "core/error.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::verify {
namespace {

std::vector<std::byte> poisoned(DType dtype, std::int64_t count) {
  const auto size = static_cast<std::size_t>(size_of(dtype));
  std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size);
  const std::uint64_t bits = poison(dtype);
  for (std::size_t at = 0; at < bytes.size(); at += size) std::memcpy(&bytes[at], &bits, size);
  return bytes;
}

}  // namespace

Partials::Partials(const Plan& plan) {
  if (plan.splits <= 1) return;
  const Problem& p = plan.problem;
  dtype = wide(p.dtype);
  splits = plan.splits;
  rows = p.q_heads * (p.q_varlen ? p.total_q : p.batch * p.q_len);
  v_dim = p.v_dim;
  out = poisoned(dtype, splits * rows * v_dim);
  lse = poisoned(dtype, splits * rows);
}

std::int64_t Partials::row_of(const Problem& p, std::int64_t split, std::int64_t b, std::int64_t h,
                              std::int64_t q_row) const {
  return split * rows + (p.q_varlen ? h * p.total_q : (b * p.q_heads + h) * p.q_len) + q_row;
}

CallRunner::CallRunner(const Backend& backend, Device device, const DeviceInfo& plan_for,
                       const char* kernel)
    : backend_(backend), device_(device), plan_for_(plan_for), kernel_(kernel) {
  plan_for_.device = device;
}

CallRunner::~CallRunner() {
  if (block_ != nullptr) backend_.release(block_, device_.index);
  if (workspace_.data != nullptr) backend_.release(workspace_.data, device_.index);
}

Status CallRunner::reserve(void*& data, std::size_t& capacity, std::size_t bytes) {
  if (bytes <= capacity && data != nullptr) return {};
  if (data != nullptr) backend_.release(data, device_.index);
  data = nullptr;
  capacity = 0;
  const Result<void*> memory = backend_.allocate(bytes, device_.index);
  if (!memory.ok()) return memory.status();
  data = *memory;
  capacity = bytes;
  return {};
}

Status CallRunner::keep_kernel_of(const HostCall& call) {
  const Result<Plan> made = plan(call);
  if (made.ok()) kernel_ = made->kernel->id;
  return made.status();
}

Result<Plan> CallRunner::plan(const HostCall& call) {
  RanCall ran;
  if (Status status = prepare(call, ran); !status.ok()) return status;
  return ran.plan;
}

Status CallRunner::prepare(const HostCall& call, RanCall& ran) {
  FLASHCORE_RETURN_IF_ERROR(reserve(block_, block_bytes_, call.bytes.size()));
  tensors_ = call.at(block_, device_);
  Options options = call.options;
  if (kernel_ != nullptr) options.kernel = kernel_;
  const Result<Problem> problem = make_problem(tensors_, options);
  if (!problem.ok()) return problem.status();
  ran.problem = *problem;
  const Result<Plan> made = make_plan(*problem, plan_for_);
  if (!made.ok()) return made.status();
  // A cluster exchanges partial results in shared memory, which cannot be read back. The last-CTA
  // mode combines them in the workspace, with the same result up to rounding.
  ran.plan = *made;
  if (ran.plan.combine == CombineMode::cluster) ran.plan.combine = CombineMode::last_cta;
  const Plan* plan = &ran.plan;
  FLASHCORE_RETURN_IF_ERROR(reserve(workspace_.data, workspace_capacity_, plan->workspace_bytes));
  workspace_.bytes = workspace_capacity_;
  workspace_.device = device_;
  FLASHCORE_RETURN_IF_ERROR(workspace_init(workspace_));
  FLASHCORE_RETURN_IF_ERROR(
      backend_.upload(block_, call.bytes.data(), call.bytes.size(), device_.index));
  ran.after = HostCall(call);
  ran.partials = Partials(*plan);
  return {};
}

Status CallRunner::upload_partials(const RanCall& ran) {
  if (ran.partials.splits == 0) return {};
  std::byte* base = static_cast<std::byte*>(workspace_.data);
  FLASHCORE_RETURN_IF_ERROR(backend_.upload(base + ran.plan.partial_out_offset,
                                            ran.partials.out.data(), ran.partials.out.size(),
                                            device_.index));
  return backend_.upload(base + ran.plan.partial_lse_offset, ran.partials.lse.data(),
                         ran.partials.lse.size(), device_.index);
}

Status CallRunner::collect(RanCall& ran) {
  FLASHCORE_RETURN_IF_ERROR(workspace_status(workspace_));
  FLASHCORE_RETURN_IF_ERROR(
      backend_.download(ran.after.bytes.data(), block_, ran.after.bytes.size(), device_.index));
  if (ran.partials.splits == 0) return {};
  const std::byte* base = static_cast<const std::byte*>(workspace_.data);
  FLASHCORE_RETURN_IF_ERROR(backend_.download(ran.partials.out.data(),
                                              base + ran.plan.partial_out_offset,
                                              ran.partials.out.size(), device_.index));
  return backend_.download(ran.partials.lse.data(), base + ran.plan.partial_lse_offset,
                           ran.partials.lse.size(), device_.index);
}

Result<RanCall> CallRunner::run(const HostCall& call) {
  RanCall ran;
  const auto steps = [&]() -> Status {
    FLASHCORE_RETURN_IF_ERROR(prepare(call, ran));
    FLASHCORE_RETURN_IF_ERROR(upload_partials(ran));
    FLASHCORE_RETURN_IF_ERROR(flashcore::run(ran.plan, tensors_, workspace_));
    return collect(ran);
  };
  if (Status status = steps(); !status.ok()) return status;
  return ran;
}

Result<RanCall> CallRunner::combine(const HostCall& call, const Partials& partials) {
  RanCall ran;
  const auto steps = [&]() -> Status {
    FLASHCORE_RETURN_IF_ERROR(prepare(call, ran));
    ran.partials = partials;
    FLASHCORE_RETURN_IF_ERROR(upload_partials(ran));
    const core::AttentionParams params = make_params(ran.plan, tensors_, workspace_);
    FLASHCORE_RETURN_IF_ERROR(backend_.combine(make_combine_params(ran.plan, params),
                                               partials.dtype, device_, ran.plan.device.threads,
                                               nullptr, nullptr));
    return collect(ran);
  };
  if (Status status = steps(); !status.ok()) return status;
  return ran;
}

}  // namespace flashcore::verify
