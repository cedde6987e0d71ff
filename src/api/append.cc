// append(): checks the tensors, fills the launch arguments, launches the copy.
#include <algorithm>

#include "api/guarded.h"
#include "api/validate/kv.h"
#include "api/validate/quant.h"
#include "api/validate/tensor.h"
#include "backend/backend.h"
#include "backend/params.h"
#include "core/append.h"

namespace flashcore {
namespace {

constexpr std::int64_t kMaxCapacity = std::int64_t{1} << 30;  // the limit of attention

using ll = long long;

/// The sizes and layouts of an append.
struct AppendShape {
  std::int64_t batch = 0, new_len = 0;  // varlen: total_new
  KvShape cache;
  Layout k_new, v_new, seqused_k, k_scale, v_scale;
};

bool quantizes_rows(DType from, DType to) noexcept {
  return is_8bit(to) && (from == DType::f32 || from == DType::f16 || from == DType::bf16);
}

Status check_new(const char* name, const TensorView& t, const TensorView& like, DType dtype,
                 std::int64_t kv_heads, std::int64_t dim, bool varlen) noexcept {
  const int axes = varlen ? 3 : 4;
  FLASHCORE_RETURN_IF_ERROR(check_rank(name, t, axes,
                                       varlen ? "[total_new, kv_heads, dim] (with cu_seqlens_new)"
                                              : "[batch, kv_heads, new_len, dim]"));
  FLASHCORE_RETURN_IF_ERROR(check_extent(name, "kv_heads", t.shape[1], kv_heads, "k"));
  FLASHCORE_RETURN_IF_ERROR(
      check_extent(name, "its last extent", t.shape[axes - 1], dim, "the cache"));
  const int row = varlen ? 0 : 2;
  FLASHCORE_RETURN_IF_ERROR(
      check_extent(name, varlen ? "total_new" : "new_len", t.shape[row], like.shape[row], "k_new"));
  if (!varlen) {
    FLASHCORE_RETURN_IF_ERROR(check_extent(name, "batch", t.shape[0], like.shape[0], "k_new"));
  }
  if (quantizes_rows(t.dtype, dtype)) return {};
  if (is_8bit(dtype) && t.dtype != dtype) {
    return invalid_argument(
        "%s: dtype is %s; wanted f32, f16 or bf16, or the cache's own type (%s)", name,
        to_string(t.dtype), to_string(dtype));
  }
  return check_dtype(name, t.dtype, dtype, dtype);
}

Status check_cache_types(const AppendTensors& t) noexcept {
  if (!t.k.given() || !t.v.given()) return {};  // parse_kv() reports it
  if (!is_float(t.k.dtype) && !is_8bit(t.k.dtype)) {
    return invalid_argument(
        "k: dtype is %s; wanted f64, f32, f16, bf16 or an 8-bit type (e4m3, e5m2, int8 or byte)",
        to_string(t.k.dtype));
  }
  if (is_8bit(t.k.dtype) && is_8bit(t.v.dtype)) return {};
  return check_dtype("v", t.v.dtype, t.k.dtype, t.k.dtype);
}

Status describe_cache_scales(const AppendTensors& t, AppendShape& shape) noexcept {
  const struct {
    const char *name, *of;
    const TensorView &scale, &cache;
    Layout& layout;
  } all[] = {{"k_scale", "k", t.k_scale, t.k, shape.k_scale},
             {"v_scale", "v", t.v_scale, t.v, shape.v_scale}};
  if (t.kv_scale_block < 0) {
    return invalid_argument("kv_scale_block is %lld; wanted 0 or a number of keys",
                            ll{t.kv_scale_block});
  }
  for (const auto& one : all) {
    if (!one.scale.given()) continue;
    if (!is_8bit(one.cache.dtype)) {
      return invalid_argument(
          "%s: given, but %s is %s; only 8-bit tensors have a scale, leave it out", one.name,
          one.of, to_string(one.cache.dtype));
    }
    FLASHCORE_RETURN_IF_ERROR(describe_scale(one.name, one.scale, shape.batch, shape.cache.kv_heads,
                                             shape.cache.kv_len, t.kv_scale_block, "kv_scale_block",
                                             one.layout));
  }
  return {};
}

Status describe_append(const AppendTensors& t, AppendShape& shape) noexcept {
  FLASHCORE_RETURN_IF_ERROR(check_cache_types(t));
  FLASHCORE_RETURN_IF_ERROR(
      check_rank("seqused_k", t.seqused_k, 1, "[batch], the keys before the append"));
  FLASHCORE_RETURN_IF_ERROR(check_dtype("seqused_k", t.seqused_k.dtype, DType::i32, DType::i32));
  shape.batch = t.seqused_k.shape[0];
  shape.seqused_k = layout_of(t.seqused_k, {0, -1, -1, -1});
  FLASHCORE_RETURN_IF_ERROR(parse_kv(t.k, t.v, t.block_table,
                                     t.block_table.given() ? KvLayout::paged : KvLayout::dense,
                                     shape.batch, "seqused_k", shape.cache));
  if (shape.cache.kv_len > kMaxCapacity) {
    return unsupported("k: a sequence's capacity is %lld; at most %lld is supported",
                       ll{shape.cache.kv_len}, ll{kMaxCapacity});
  }
  const bool varlen = t.cu_seqlens_new.given();
  FLASHCORE_RETURN_IF_ERROR(check_new("k_new", t.k_new, t.k_new, t.k.dtype, shape.cache.kv_heads,
                                      shape.cache.head_dim, varlen));
  FLASHCORE_RETURN_IF_ERROR(check_new("v_new", t.v_new, t.k_new, t.v.dtype, shape.cache.kv_heads,
                                      shape.cache.v_dim, varlen));
  if (varlen) {
    const TensorView& ends = t.cu_seqlens_new;
    FLASHCORE_RETURN_IF_ERROR(check_rank("cu_seqlens_new", ends, 1, "[batch + 1]"));
    FLASHCORE_RETURN_IF_ERROR(check_dtype("cu_seqlens_new", ends.dtype, DType::i32, DType::i32));
    FLASHCORE_RETURN_IF_ERROR(
        check_extent("cu_seqlens_new", "length - 1", ends.shape[0] - 1, shape.batch, "seqused_k"));
    if (ends.shape[0] > 1 && ends.strides[0] != 1) {
      return invalid_argument("cu_seqlens_new: stride is %lld; it must be contiguous",
                              ll{ends.strides[0]});
    }
  } else {
    FLASHCORE_RETURN_IF_ERROR(
        check_extent("k_new", "batch", t.k_new.shape[0], shape.batch, "seqused_k"));
  }
  shape.new_len = t.k_new.shape[varlen ? 0 : 2];
  const Axes axes = varlen ? Axes{-1, 1, 0, 2} : Axes{0, 1, 2, 3};
  shape.k_new = layout_of(t.k_new, axes);
  shape.v_new = layout_of(t.v_new, axes);
  return describe_cache_scales(t, shape);
}

Status check_append_memory(const AppendTensors& t) noexcept {
  const NamedView inputs[] = {{"k_new", &t.k_new},
                              {"v_new", &t.v_new},
                              {"seqused_k", &t.seqused_k},
                              {"block_table", &t.block_table},
                              {"cu_seqlens_new", &t.cu_seqlens_new},
                              {"k_scale", &t.k_scale},
                              {"v_scale", &t.v_scale}};
  const NamedView outputs[] = {{"k", &t.k}, {"v", &t.v}};
  const auto check = [&](const NamedView& named) noexcept -> Status {
    const auto& [name, view] = named;
    if (!view->given()) return {};
    if (view->device != t.k.device) {
      return invalid_argument("%s: is on %s:%d, k is on %s:%d; all tensors must be on one device",
                              name, to_string(view->device.type), view->device.index,
                              to_string(t.k.device.type), t.k.device.index);
    }
    return check_pointer(name, *view);
  };
  for (const NamedView& input : inputs) FLASHCORE_RETURN_IF_ERROR(check(input));
  for (const NamedView& output : outputs) FLASHCORE_RETURN_IF_ERROR(check(output));
  return check_outputs(outputs, inputs);
}

core::AppendTensor append_tensor(const TensorView& from, const Layout& from_layout,
                                 const TensorView& to, const Layout& to_layout,
                                 const core::Scales& scales, std::int64_t columns) noexcept {
  const auto strides = [](const Layout& layout) -> core::Strides {
    return {layout.batch, layout.head, layout.row, layout.column};
  };
  const bool contiguous = from_layout.column == 1 && to_layout.column == 1;
  const bool aligned = std::min(from_layout.alignment_bytes, to_layout.alignment_bytes) >= 16;
  return {from.data,
          to.data,
          strides(from_layout),
          strides(to_layout),
          static_cast<std::int32_t>(columns),
          contiguous && aligned && columns * size_of(to.dtype) % 16 == 0,
          quantizes_rows(from.dtype, to.dtype),
          static_cast<std::int32_t>(size_of(to.dtype)),
          element_of(from.dtype),
          element_of(to.dtype),
          scales};
}

}  // namespace

Status append(const AppendTensors& tensors, Workspace workspace, Stream stream,
              const std::int32_t* cancel) noexcept {
  return guarded([&]() -> Status {
    const AppendTensors& t = tensors;
    AppendShape shape;
    FLASHCORE_RETURN_IF_ERROR(describe_append(t, shape));
    FLASHCORE_RETURN_IF_ERROR(check_append_memory(t));
    core::AppendParams p{};
    if (header_of(workspace) != nullptr) {
      FLASHCORE_RETURN_IF_ERROR(check_workspace(workspace, kWorkspaceHeaderBytes));
      FLASHCORE_RETURN_IF_ERROR(check_workspace_device(workspace, t.k.device, "k"));
      p.error = static_cast<core::ErrorSlot*>(header_of(workspace));
    }
    const Result<const Backend*> backend = backend_for(t.k.device.type);
    if (!backend.ok()) return backend.status();

    const auto narrow = [](std::int64_t extent) { return static_cast<std::int32_t>(extent); };
    const KvShape& cache = shape.cache;
    p.k = append_tensor(t.k_new, shape.k_new, t.k, cache.k,
                        scales_of(t.k_scale, shape.k_scale, t.kv_scale_block), cache.head_dim);
    p.v = append_tensor(t.v_new, shape.v_new, t.v, cache.v,
                        scales_of(t.v_scale, shape.v_scale, t.kv_scale_block), cache.v_dim);
    p.used_k = static_cast<const std::int32_t*>(t.seqused_k.data);
    p.used_k_stride = shape.seqused_k.batch;
    p.cu_seqlens_new = static_cast<const std::int32_t*>(t.cu_seqlens_new.data);
    p.pages = pages_of(cache.page_size, cache.pages, t.block_table);
    p.batch = narrow(shape.batch);
    p.kv_heads = narrow(cache.kv_heads);
    p.new_len = narrow(shape.new_len);
    p.capacity = narrow(cache.kv_len);
    if (p.batch == 0 || core::append_rows(p) == 0) return {};
    FLASHCORE_RETURN_IF_ERROR(check_cancel(cancel));
    return (*backend)->append(p, t.k.device, stream, cancel);
  });
}

}  // namespace flashcore
