// The C ABI of gradients.
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "api/c_convert.h"
#include "api/c_entry.h"
#include "core/error.h"
#include "flashcore/backward.h"
#include "flashcore/flashcore.h"

namespace flashcore {
namespace {

/// Views [batch, len, heads, dim] memory as [batch, heads, len, dim], as c_convert.cc does for the
/// forward's tensors.
void swap_gradient_axes(const Tensors& t, Gradients& g) {
  const bool kv_dense = !t.cu_seqlens_k.given();
  for (TensorView* one : {&g.dout, &g.dq, kv_dense ? &g.dk : nullptr, kv_dense ? &g.dv : nullptr}) {
    if (one == nullptr || one->rank != 4) continue;
    std::swap(one->shape[1], one->shape[2]);
    std::swap(one->strides[1], one->strides[2]);
  }
}

Result<BackwardPlan> backward_plan_of(const CBackwardCall& made) {
  const Result<BackwardProblem> problem =
      make_backward_problem(made.call.tensors, made.gradients, made.call.options);
  if (!problem.ok()) return problem.status();
  const Result<DeviceInfo> device = device_info(problem->forward.device);
  if (!device.ok()) return device.status();
  DeviceInfo info = *device;
  const std::int32_t threads = made.call.params.threads;
  if (threads < 0) return invalid_argument("threads is %d; wanted 0 or more", threads);
  if (threads > 0) info.threads = threads;
  const Result<BackwardPlan> usual = make_backward_plan(*problem, info);
  if (!usual.ok()) return usual.status();
  BackwardPlan plan = *usual;
  plan.exact_stats = plan.exact_stats && !made.global_lse;
  return plan;
}

/// Copies the caller's params to `to`, which contains the defaults. Callers of version 0.1 have no
/// global_lse.
Status copy_params(const flashcore_backward_params* from, flashcore_backward_params& to) {
  if (from == nullptr) return invalid_argument("params: is NULL");
  const std::size_t size = from->struct_size;
  if (size < offsetof(flashcore_backward_params, global_lse) || size > sizeof to ||
      size % alignof(flashcore_backward_params) != 0) {
    return check_struct("params", size, sizeof to);
  }
  std::memcpy(&to, from, size);
  return {};
}

/// Converts and plans a call, then runs the body of an entry point with both.
template <typename Body>
std::int32_t planned_backward(const flashcore_backward_params* params, flashcore_error* error,
                              Body body) noexcept {
  return entry(error, [&]() -> Status {
    const Result<CBackwardCall> call = convert_backward(params);
    if (!call.ok()) return call.status();
    const Result<BackwardPlan> plan = backward_plan_of(*call);
    if (!plan.ok()) return plan.status();
    return body(*call, *plan);
  });
}

}  // namespace

Result<CBackwardCall> convert_backward(const flashcore_backward_params* params) {
  flashcore_backward_params p{};
  FLASHCORE_RETURN_IF_ERROR(copy_params(params, p));
  if (p.call == nullptr) return invalid_argument("call: is NULL");
  if (p.global_lse != 0 && p.global_lse != 1) {
    return invalid_argument("global_lse is %d; wanted 0 or 1", p.global_lse);
  }
  const Result<CCall> call = convert(p.call);
  if (!call.ok()) return call.status();
  CBackwardCall made{*call, {}, p.global_lse == 1};
  Gradients& g = made.gradients;
  FLASHCORE_RETURN_IF_ERROR(convert("dout", p.dout, TypeRule::several, g.dout));
  FLASHCORE_RETURN_IF_ERROR(convert("dlse", p.dlse, TypeRule::wide, g.dlse));
  FLASHCORE_RETURN_IF_ERROR(convert("dq", p.dq, TypeRule::several, g.dq));
  FLASHCORE_RETURN_IF_ERROR(convert("dk", p.dk, TypeRule::several, g.dk));
  FLASHCORE_RETURN_IF_ERROR(convert("dv", p.dv, TypeRule::several, g.dv));
  FLASHCORE_RETURN_IF_ERROR(convert("dbias", p.dbias, TypeRule::several, g.dbias));
  FLASHCORE_RETURN_IF_ERROR(convert("dsinks", p.dsinks, TypeRule::f32, g.dsinks));
  if (made.call.params.layout == 1) swap_gradient_axes(made.call.tensors, g);
  return made;
}

}  // namespace flashcore

using namespace flashcore;  // NOLINT: only C functions follow

std::int32_t flashcore_backward_plan(const flashcore_backward_params* params,
                                     flashcore_plan_info* info, flashcore_error* error) {
  return entry(error, [&]() -> Status {
    if (info == nullptr) return invalid_argument("info: is NULL");
    FLASHCORE_RETURN_IF_ERROR(check_struct("info", info->struct_size, sizeof *info));
    const Result<CBackwardCall> call = convert_backward(params);
    if (!call.ok()) return call.status();
    const Result<BackwardPlan> plan = backward_plan_of(*call);
    if (!plan.ok()) return plan.status();
    const Problem& p = plan->problem.forward;
    const std::int64_t tiles =
        p.batch * p.q_heads * ((p.q_len + plan->tile_q - 1) / plan->tile_q) +
        p.batch * p.kv_heads * ((p.kv_len + plan->tile_k - 1) / plan->tile_k);
    *info = {sizeof *info,
             plan->kernel->id,
             plan->kernel->family_name(),
             plan->workspace_bytes,
             tiles,
             plan->tile_q,
             plan->tile_k,
             1,
             p.options.checked ? 1 : 0};
    return {};
  });
}

std::int32_t flashcore_backward_explain(const flashcore_backward_params* params, char* text,
                                        std::size_t capacity, std::size_t* needed,
                                        flashcore_error* error) {
  return planned_backward(params, error,
                          [&](const CBackwardCall&, const BackwardPlan& plan) -> Status {
                            const std::string words = explain(plan);
                            if (needed != nullptr) *needed = words.size() + 1;
                            if (text != nullptr && capacity > 0)
                              std::snprintf(text, capacity, "%s", words.c_str());
                            return {};
                          });
}

std::int32_t flashcore_attention_backward(const flashcore_backward_params* params,
                                          flashcore_error* error) {
  return planned_backward(params, error, [](const CBackwardCall& made, const BackwardPlan& plan) {
    const flashcore_params& p = made.call.params;
    return run_backward(
        plan, made.call.tensors, made.gradients,
        {p.workspace, p.workspace_bytes, plan.problem.forward.device, p.workspace_header}, p.stream,
        p.cancel);
  });
}
