// quantize() and dequantize(): check the tensors, fill the launch arguments, launch.
#include "flashcore/quant.h"

#include <algorithm>

#include "api/guarded.h"
#include "api/validate/kv.h"
#include "api/validate/quant.h"
#include "api/validate/tensor.h"
#include "backend/backend.h"
#include "core/params.h"
#include "core/quantize.h"

namespace flashcore {
namespace {

using ll = long long;

// Approximate elements per task: large enough to amortise the overhead of a task, small enough to
// balance the threads.
constexpr std::int64_t kUnitElements = 16384;

/// Views the tensor with rank 4 by adding leading axes of extent 1.
Status four_axes(const char* name, const TensorView& t, TensorView& padded) noexcept {
  if (!t.given()) {
    return invalid_argument("%s: not given; wanted a tensor of rank 1 to 4", name);
  }
  FLASHCORE_RETURN_IF_ERROR(check_view(name, t));
  padded = t;
  padded.rank = 4;
  for (int i = 3; i >= 0; --i) {
    const int axis = i - (4 - t.rank);
    padded.shape[i] = axis >= 0 ? t.shape[axis] : 1;
    padded.strides[i] = axis >= 0 ? t.strides[axis] : 0;
  }
  return {};
}

core::Strides strides_of(const Layout& layout) noexcept {
  return {layout.batch, layout.head, layout.row, layout.column};
}

Status check_types(const QuantTensors& t, bool quantizes) noexcept {
  const TensorView& wide = quantizes ? t.from : t.to;
  const TensorView& narrow = quantizes ? t.to : t.from;
  if (wide.dtype != DType::f32 && wide.dtype != DType::f16 && wide.dtype != DType::bf16) {
    return invalid_argument("%s: dtype is %s; wanted f32, f16 or bf16", quantizes ? "from" : "to",
                            to_string(wide.dtype));
  }
  if (!is_8bit(narrow.dtype)) {
    return invalid_argument("%s: dtype is %s; wanted e4m3, e5m2, int8 or byte",
                            quantizes ? "to" : "from", to_string(narrow.dtype));
  }
  return {};
}

Status check_memory(const QuantTensors& t, bool quantizes, bool given_scale) noexcept {
  const NamedView all[] = {
      {"from", &t.from}, {"to", &t.to}, {"scale", &t.scale}, {"saturated", &t.saturated}};
  for (const auto& [name, view] : all) {
    if (!view->given()) continue;
    if (view->device != t.from.device) {
      return invalid_argument(
          "%s: is on %s:%d, from is on %s:%d; all tensors must be on one device", name,
          to_string(view->device.type), view->device.index, to_string(t.from.device.type),
          t.from.device.index);
    }
    FLASHCORE_RETURN_IF_ERROR(check_pointer(name, *view));
  }
  if (!quantizes || given_scale) {
    const NamedView inputs[] = {{"from", &t.from}, {"scale", &t.scale}};
    const NamedView outputs[] = {{"to", &t.to}, {"saturated", &t.saturated}};
    return check_outputs(outputs, inputs);
  }
  const NamedView inputs[] = {{"from", &t.from}};
  const NamedView outputs[] = {{"to", &t.to}, {"scale", &t.scale}, {"saturated", &t.saturated}};
  return check_outputs(outputs, inputs);
}

/// Checks the tensors and fills the launch arguments.
Status describe(const QuantTensors& t, const QuantOptions& options, bool quantizes,
                core::QuantParams& p) noexcept {
  TensorView from, to;
  FLASHCORE_RETURN_IF_ERROR(four_axes("from", t.from, from));
  FLASHCORE_RETURN_IF_ERROR(four_axes("to", t.to, to));
  FLASHCORE_RETURN_IF_ERROR(check_types(t, quantizes));
  for (int i = 0; i < 4; ++i) {
    if (to.shape[i] == from.shape[i] && t.to.rank == t.from.rank) continue;
    return invalid_argument("to: its shape differs from that of from; they must match");
  }
  if (options.block_rows < 0) {
    return invalid_argument("block_rows is %lld; wanted 0 or a number of rows",
                            ll{options.block_rows});
  }
  if (options.rotate && from.shape[3] > core::kMaxRotatedColumns) {
    return invalid_argument("from: has %lld columns; rotate takes at most %d", ll{from.shape[3]},
                            core::kMaxRotatedColumns);
  }
  Layout scale, saturated;
  FLASHCORE_RETURN_IF_ERROR(describe_scale("scale", t.scale, from.shape[0], from.shape[1],
                                           from.shape[2], options.block_rows, "block_rows", scale));
  if (t.saturated.given()) {
    FLASHCORE_RETURN_IF_ERROR(check_rank("saturated", t.saturated, t.scale.rank, "like scale"));
    for (int i = 0; i < t.scale.rank; ++i) {
      FLASHCORE_RETURN_IF_ERROR(
          check_extent("saturated", "an extent", t.saturated.shape[i], t.scale.shape[i], "scale"));
    }
    FLASHCORE_RETURN_IF_ERROR(check_dtype("saturated", t.saturated.dtype, DType::i32, DType::i32));
    const bool heads = t.scale.rank > 1;
    saturated =
        layout_of(t.saturated, {heads ? 0 : -1, heads ? 1 : -1, t.scale.rank == 3 ? 2 : -1, -1});
  }
  FLASHCORE_RETURN_IF_ERROR(check_memory(t, quantizes, options.given_scale));

  const auto narrow = [](std::int64_t extent) { return static_cast<std::int32_t>(extent); };
  p.from = t.from.data;
  p.to = t.to.data;
  const Layout from_layout = layout_of(from, {0, 1, 2, 3});
  const Layout to_layout = layout_of(to, {0, 1, 2, 3});
  p.from_strides = strides_of(from_layout);
  p.to_strides = strides_of(to_layout);
  p.wide = element_of(quantizes ? t.from.dtype : t.to.dtype);
  p.code = element_of(quantizes ? t.to.dtype : t.from.dtype);
  p.scale = static_cast<float*>(t.scale.data);
  p.saturated = quantizes ? static_cast<std::int32_t*>(t.saturated.data) : nullptr;
  p.scale_strides = strides_of(scale);
  p.saturated_strides = strides_of(saturated);
  p.batch = narrow(from.shape[0]);
  p.heads = narrow(from.shape[1]);
  p.rows = narrow(from.shape[2]);
  p.columns = narrow(from.shape[3]);
  const bool blocks = t.scale.rank == 3;
  const std::int64_t all_rows = std::max<std::int64_t>(from.shape[2], 1);
  p.block_rows = narrow(blocks ? std::min(options.block_rows, all_rows) : all_rows);
  const std::int64_t unit_rows =
      std::max<std::int64_t>(kUnitElements / std::max<std::int64_t>(from.shape[3], 1), 1);
  p.unit_rows = narrow(blocks ? p.block_rows : std::min(unit_rows, all_rows));
  p.slots_batch = t.scale.rank > 1 ? narrow(t.scale.shape[0]) : 1;
  p.slots_heads = t.scale.rank > 1 ? narrow(t.scale.shape[1]) : 1;
  p.slots_blocks = blocks ? narrow(t.scale.shape[2]) : 1;
  p.given_scale = !quantizes || options.given_scale;
  p.rotate = options.rotate;
  const auto has_vectors = [&](const Layout& layout) {
    return layout.column == 1 && layout.alignment_bytes >= 16 && p.columns % 16 == 0;
  };
  p.vectors = has_vectors(from_layout) && has_vectors(to_layout);
  return {};
}

}  // namespace

Status quantize(const QuantTensors& tensors, const QuantOptions& options, Workspace workspace,
                Stream stream, const std::int32_t* cancel) noexcept {
  return guarded([&]() -> Status {
    core::QuantParams p{};
    FLASHCORE_RETURN_IF_ERROR(describe(tensors, options, true, p));
    if (header_of(workspace) != nullptr) {
      FLASHCORE_RETURN_IF_ERROR(check_workspace(workspace, kWorkspaceHeaderBytes));
      FLASHCORE_RETURN_IF_ERROR(check_workspace_device(workspace, tensors.from.device, "from"));
      p.error = static_cast<core::ErrorSlot*>(header_of(workspace));
    }
    const Result<const Backend*> backend = backend_for(tensors.from.device.type);
    if (!backend.ok()) return backend.status();
    FLASHCORE_RETURN_IF_ERROR(check_cancel(cancel));
    return (*backend)->quantize(p, tensors.from.device, stream, cancel);
  });
}

Status dequantize(const QuantTensors& tensors, const QuantOptions& options, Stream stream,
                  const std::int32_t* cancel) noexcept {
  return guarded([&]() -> Status {
    core::QuantParams p{};
    FLASHCORE_RETURN_IF_ERROR(describe(tensors, options, false, p));
    const Result<const Backend*> backend = backend_for(tensors.from.device.type);
    if (!backend.ok()) return backend.status();
    if (core::quant_units(p) == 0 || p.columns == 0) return {};
    FLASHCORE_RETURN_IF_ERROR(check_cancel(cancel));
    return (*backend)->dequantize(p, tensors.from.device, stream, cancel);
  });
}

}  // namespace flashcore
