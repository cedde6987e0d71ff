// Checks gradients against the oracle.
#include <algorithm>
#include <cstring>

#include "check/check.h"
#include "check/gradient_memory.h"
#include "core/error.h"
#include "verify/inputs/call.h"
#include "verify/inputs/case_memory.h"
#include "verify/inputs/compare_bwd.h"
#include "verify/inputs/random.h"

namespace flashcore::verify {
namespace {

constexpr std::uint64_t kGradientStream = 60;
constexpr int kOtherThreads = 3;

TensorView Gradients::*const kGradientOutputs[] = {&Gradients::dq, &Gradients::dk, &Gradients::dv,
                                                   &Gradients::dbias, &Gradients::dsinks};
TensorView Gradients::*const kAllGradients[] = {
    &Gradients::dout, &Gradients::dlse,  &Gradients::dq,    &Gradients::dk,
    &Gradients::dv,   &Gradients::dbias, &Gradients::dsinks};

/// Writes the oracle's out and lse into the copy of a case at `base`.
void store_forward(const CaseMemory& memory, std::byte* base, const Problem& problem) {
  const Tensors t = memory.at(base, Device{});
  const reference::Oracle o =
      reference::compute(problem, t, reference::all_rows(problem, t), false, 1);
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
}

}  // namespace

GradientMemory::GradientMemory(const CaseSpec& spec, const Tensors& t) {
  Random random(spec.seed, kGradientStream);
  const auto type = [&](DType own) { return random.chance(0.2) ? DType::f32 : own; };
  const auto layout = [&] { return random.chance(0.3); };
  const auto wanted = [&] { return random.chance(0.85); };
  Gradients& g = gradients_;
  g.dout = place(t.out, type(spec.dtype), layout());
  if (random.chance(0.5)) g.dlse = place(t.lse, t.lse.dtype, false);
  if (wanted()) g.dq = place(t.q, type(spec.dtype), layout());
  if (wanted()) g.dk = place(t.k, type(spec.dtype), layout());
  if (wanted()) g.dv = place(t.v, type(spec.dtype), layout());
  if (t.bias.given() && wanted()) g.dbias = place(t.bias, type(spec.dtype), layout());
  if (t.sinks.given() && wanted()) g.dsinks = place(t.sinks, DType::f32, false);
  for (TensorView Gradients::*one : kAllGradients) {
    TensorView& view = g.*one;
    if (view.given()) view.data = bytes_.data() + reinterpret_cast<std::uintptr_t>(view.data);
  }
  static constexpr double kSizes[] = {1e-6, 1.0, 1.0, 1e3};
  const double size = random.pick(kSizes);
  for (const TensorView* view : {&g.dout, &g.dlse}) {
    if (!view->given()) continue;
    for_each_element(*view, [&](std::int64_t at) {
      store(view->data, view->dtype, at, size * random.normal());
    });
  }
  poison_outputs();
}

/// Until the block is complete, `data` is the offset in the block.
TensorView GradientMemory::place(const TensorView& like, DType dtype, bool padded) {
  constexpr std::int64_t kGuard = 256;
  TensorView t;
  t.dtype = dtype;
  t.rank = like.rank;
  std::int64_t stride = 1;
  for (int axis = t.rank - 1; axis >= 0; --axis) {
    t.shape[axis] = like.shape[axis];
    t.strides[axis] = stride;
    stride = stride * std::max<std::int64_t>(t.shape[axis], 1) + (padded ? 3 : 0);
  }
  auto offset = static_cast<std::int64_t>(bytes_.size()) + kGuard;
  offset = (offset + kGuard - 1) / kGuard * kGuard;
  t.data = reinterpret_cast<void*>(static_cast<std::uintptr_t>(offset));
  bytes_.resize(static_cast<std::size_t>(offset + stride * size_of(dtype) + kGuard),
                std::byte{0xff});
  return t;
}

void GradientMemory::poison_outputs() {
  for (TensorView Gradients::*one : kGradientOutputs) {
    const TensorView& view = gradients_.*one;
    const std::uint64_t bits = poison(view.dtype);
    const auto size = static_cast<std::size_t>(size_of(view.dtype));
    if (!view.given()) continue;
    for_each_element(view, [&](std::int64_t at) {
      std::memcpy(static_cast<std::byte*>(view.data) + static_cast<std::size_t>(at) * size, &bits,
                  size);
    });
  }
}

Gradients GradientMemory::at(void* base, Device device) const {
  Gradients moved = gradients_;
  for (TensorView Gradients::*one : kAllGradients) {
    TensorView& view = moved.*one;
    if (!view.given()) continue;
    view.data =
        static_cast<std::byte*>(base) + (static_cast<std::byte*>(view.data) - bytes_.data());
    view.device = device;
  }
  return moved;
}

bool GradientMemory::only_outputs_changed(const std::vector<std::byte>& after) const {
  std::vector<std::byte> expected = bytes_;
  for (TensorView Gradients::*one : kGradientOutputs) {
    const TensorView& view = gradients_.*one;
    if (!view.given()) continue;
    const auto size = static_cast<std::size_t>(size_of(view.dtype));
    const auto first = static_cast<std::size_t>(static_cast<std::byte*>(view.data) - bytes_.data());
    for_each_element(view, [&](std::int64_t at) {
      const std::size_t offset = first + static_cast<std::size_t>(at) * size;
      std::memcpy(expected.data() + offset, after.data() + offset, size);
    });
  }
  return expected == after;
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
  store_forward(memory, host.data(), problem.forward);
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
    FLASHCORE_RETURN_IF_ERROR(reserve(workspace_.data, workspace_capacity_, plan->workspace_bytes));
    workspace_.bytes = workspace_capacity_;
    workspace_.device = device_;
    // NaN in every float format: no kernel may read what it has not written.
    const std::vector<std::byte> ones(workspace_capacity_, std::byte{0xff});
    FLASHCORE_RETURN_IF_ERROR(
        backend_.upload(workspace_.data, ones.data(), ones.size(), device_.index));
    FLASHCORE_RETURN_IF_ERROR(backend_.upload(block_, host.data(), host.size(), device_.index));
    FLASHCORE_RETURN_IF_ERROR(backend_.upload(base + case_bytes, gradients.bytes().data(),
                                              gradients.bytes().size(), device_.index));
    FLASHCORE_RETURN_IF_ERROR(run_backward(*plan, tensors_, views, workspace_));
    FLASHCORE_RETURN_IF_ERROR(backend_.download((first ? after : again).data(), base + case_bytes,
                                                after.size(), device_.index));
  }
  FLASHCORE_RETURN_IF_ERROR(backend_.download(inputs.data(), block_, inputs.size(), device_.index));
  if (after != again) {
    return error(StatusCode::internal, "%d threads gave other bits than %d", kOtherThreads,
                 plan_for_.threads);
  }
  outcome.stray_writes = inputs != host || !gradients.only_outputs_changed(after);
  const Tensors forward = memory.at(host.data(), Device{});
  const bool truncates =
      arithmetic_of(problem.forward.dtype, outcome.plan.kernel->probability_dtype).truncates_sums;
  const reference::GradientOracle oracle = reference::compute_gradients(
      problem.forward, forward, gradients.gradients(),
      {problem.forward.dtype == DType::f64 ? 0x1p-52 : 0x1p-24, truncates});
  outcome.comparison = compare_gradients(oracle, gradients.at(after.data(), Device{}),
                                         outcome.plan.kernel->probability_dtype);
  return {};
}

CheckRunner::Outcome CheckRunner::check_backward(const CaseSpec& spec) {
  Outcome outcome;
  const CaseMemory memory(spec);
  GradientMemory gradients(memory.spec(), memory.tensors());
  BackwardProblem problem;
  outcome.status = run_gradients(memory, gradients, outcome, problem);
  // The next check() must initialise the header again.
  if (workspace_.data != nullptr) {
    backend_.release(workspace_.data, device_.index);
    workspace_.data = nullptr;
    workspace_capacity_ = 0;
  }
  return outcome;
}

}  // namespace flashcore::verify
