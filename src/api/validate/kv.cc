#include "api/validate/kv.h"

#include <cstdint>

#include "api/validate/tensor.h"
#include "core/error.h"

namespace flashcore {
namespace {

constexpr std::int64_t kMaxPageSize = 256;

using ll = long long;

std::int32_t alignment(const TensorView& t, const Layout& layout) noexcept {
  std::uint64_t bits = reinterpret_cast<std::uintptr_t>(t.data) | 128u;
  for (const std::int64_t s : {layout.batch, layout.head, layout.row}) {
    bits |= static_cast<std::uint64_t>(s) * static_cast<std::uint64_t>(size_of(t.dtype));
  }
  return static_cast<std::int32_t>(bits & (~bits + 1));
}

/// Rank, axes and their names of one layout.
struct LayoutInfo {
  int rank;
  Axes axes;
  const char* shape;
  const char* names[3];  // names of all axes but the last
};

const LayoutInfo& info_of(KvLayout layout) noexcept {
  static constexpr LayoutInfo kDense = {
      4, {0, 1, 2, 3}, "[batch, kv_heads, kv_len, head_dim]", {"batch", "kv_heads", "kv_len"}};
  static constexpr LayoutInfo kVarlen = {3,
                                         {-1, 1, 0, 2},
                                         "[total_k, kv_heads, head_dim] (with cu_seqlens_k)",
                                         {"total_k", "kv_heads", nullptr}};
  static constexpr LayoutInfo kPaged = {4,
                                        {0, 2, 1, 3},
                                        "[pages, page_size, kv_heads, head_dim] (with block_table)",
                                        {"pages", "page_size", "kv_heads"}};
  return layout == KvLayout::dense ? kDense : layout == KvLayout::varlen ? kVarlen : kPaged;
}

Status describe_pages(const TensorView& k, const TensorView& block_table, std::int64_t batch,
                      const char* batch_of, KvShape& shape) noexcept {
  FLASHCORE_RETURN_IF_ERROR(check_rank("block_table", block_table, 2, "[batch, max_pages]"));
  FLASHCORE_RETURN_IF_ERROR(check_dtype("block_table", block_table.dtype, DType::i32, DType::i32));
  FLASHCORE_RETURN_IF_ERROR(
      check_extent("block_table", "batch", block_table.shape[0], batch, batch_of));
  const std::int64_t max_pages = block_table.shape[1];
  if (max_pages > 1 && block_table.strides[1] != 1) {
    return invalid_argument(
        "block_table: stride 1 is %lld; the page ids of a sequence must be contiguous (rows may be "
        "strided)",
        ll{block_table.strides[1]});
  }
  shape.pages = k.shape[0];
  shape.page_size = k.shape[1];
  if (shape.page_size < 1 || shape.page_size > kMaxPageSize) {
    return unsupported("k: page_size is %lld; 1 to %lld are supported", ll{shape.page_size},
                       ll{kMaxPageSize});
  }
  if (shape.pages == 0 && max_pages > 0) {
    return invalid_argument(
        "k: has no pages, but block_table has %lld columns; without pages it must have 0",
        ll{max_pages});
  }
  shape.kv_len = max_pages * shape.page_size;
  shape.block_table = layout_of(block_table, {0, -1, -1, 1});
  return {};
}

}  // namespace

Layout layout_of(const TensorView& t, const Axes& axes) noexcept {
  Layout layout;
  layout.dtype = t.dtype;
  // The stride of an axis; 0 if the axis has at most one index.
  const auto at = [&](int axis) {
    return axis < 0 || t.shape[axis] <= 1 ? std::int64_t{0} : t.strides[axis];
  };
  layout.batch = at(axes.batch);
  layout.head = at(axes.head);
  layout.row = at(axes.row);
  // A single column counts as contiguous with any stride.
  layout.column = axes.column < 0 ? 0 : t.shape[axes.column] > 1 ? t.strides[axes.column] : 1;
  layout.alignment_bytes = alignment(t, layout);
  return layout;
}

Status parse_kv(const TensorView& k, const TensorView& v, const TensorView& block_table,
                KvLayout layout, std::int64_t batch, const char* batch_of,
                KvShape& shape) noexcept {
  const LayoutInfo& info = info_of(layout);
  FLASHCORE_RETURN_IF_ERROR(check_rank("k", k, info.rank, info.shape));
  FLASHCORE_RETURN_IF_ERROR(check_rank("v", v, info.rank, info.shape));
  switch (layout) {
    case KvLayout::dense:
      FLASHCORE_RETURN_IF_ERROR(check_extent("k", "batch", k.shape[0], batch, batch_of));
      shape.kv_len = k.shape[2];
      break;
    case KvLayout::varlen:
      shape.total_k = k.shape[0];
      shape.kv_len = shape.total_k;
      break;
    case KvLayout::paged:
      FLASHCORE_RETURN_IF_ERROR(describe_pages(k, block_table, batch, batch_of, shape));
      break;
  }
  for (int i = 0; i + 1 < info.rank; ++i) {
    FLASHCORE_RETURN_IF_ERROR(check_extent("v", info.names[i], v.shape[i], k.shape[i], "k"));
  }
  shape.kv_heads = k.shape[info.axes.head];
  shape.head_dim = k.shape[info.axes.column];
  shape.v_dim = v.shape[info.axes.column];
  shape.k = layout_of(k, info.axes);
  shape.v = layout_of(v, info.axes);
  return {};
}

}  // namespace flashcore
