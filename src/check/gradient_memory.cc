#include "check/gradient_memory.h"

#include <algorithm>
#include <cstring>

#include "plan/kernel_traits.h"
#include "plan/planner.h"
#include "verify/inputs/case_memory.h"
#include "verify/inputs/random.h"

namespace flashcore::verify {
namespace {

constexpr std::uint64_t kGradientStream = 60;
TensorView Gradients::*const kGradientOutputs[] = {&Gradients::dq, &Gradients::dk, &Gradients::dv,
                                                   &Gradients::dbias, &Gradients::dsinks};
TensorView Gradients::*const kAllGradients[] = {
    &Gradients::dout, &Gradients::dlse,  &Gradients::dq,    &Gradients::dk,
    &Gradients::dv,   &Gradients::dbias, &Gradients::dsinks};

}  // namespace

GradientMemory::GradientMemory(const CaseSpec& spec, const Tensors& t) {
  Random random(spec.seed, kGradientStream);
  const KernelInfo* kernel = find_kernel(spec.options.kernel);
  const bool tma = kernel != nullptr && takes_aligned_gradients(*kernel);
  const auto type = [&](DType own) { return random.chance(0.2) ? DType::f32 : own; };
  const auto layout = [&] {
    const bool padded = random.chance(0.3);
    return tma ? (padded ? Rows::aligned_apart : Rows::aligned)
               : (padded ? Rows::apart : Rows::dense);
  };
  const bool all = kernel != nullptr && is_fused(*kernel);
  const auto wanted = [&] { return random.chance(0.85) || all; };
  Gradients& g = gradients_;
  const DType dout = type(spec.dtype);
  const bool own_dout = kernel != nullptr && !takes_f32_dout(*kernel);
  g.dout = place(t.out, own_dout ? spec.dtype : dout, layout());
  if (random.chance(0.5)) g.dlse = place(t.lse, t.lse.dtype, Rows::dense);
  // A Hopper kernel computes dq, and dk or dv or both.
  if (wanted() || tma) g.dq = place(t.q, type(spec.dtype), layout());
  if (wanted()) g.dk = place(t.k, type(spec.dtype), layout());
  if (wanted() || (tma && !g.dk.given())) g.dv = place(t.v, type(spec.dtype), layout());
  if (t.bias.given() && wanted()) g.dbias = place(t.bias, type(spec.dtype), layout());
  if (t.sinks.given() && wanted()) g.dsinks = place(t.sinks, DType::f32, Rows::dense);
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
TensorView GradientMemory::place(const TensorView& like, DType dtype, Rows rows) {
  constexpr std::int64_t kGuard = 256, kAlignment = 8;
  const bool aligned = rows == Rows::aligned || rows == Rows::aligned_apart;
  const std::int64_t gap = rows == Rows::apart ? 3 : rows == Rows::aligned_apart ? kAlignment : 0;
  TensorView t;
  t.dtype = dtype;
  t.rank = like.rank;
  std::int64_t stride = 1;
  for (int axis = t.rank - 1; axis >= 0; --axis) {
    t.shape[axis] = like.shape[axis];
    t.strides[axis] = stride;
    stride = stride * std::max<std::int64_t>(t.shape[axis], 1) + gap;
    if (aligned) stride = (stride + kAlignment - 1) / kAlignment * kAlignment;
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
  return are_equal(expected, after);
}

}  // namespace flashcore::verify
