#include "api/validate/quant.h"

#include "api/validate/kv.h"
#include "api/validate/tensor.h"
#include "core/error.h"

namespace flashcore {
namespace {

using ll = long long;

Status check_storage(const char* name, DType got, DType q) noexcept {
  if (got == q || (is_8bit(got) && q != DType::f64)) return {};
  if (is_8bit(q)) {
    return invalid_argument(
        "%s: dtype is %s, q is %s; with an 8-bit q it must be 8-bit too (e4m3, e5m2, int8 or "
        "byte): use quantize()",
        name, to_string(got), to_string(q));
  }
  if (q == DType::f64) {
    return invalid_argument("%s: dtype is %s; wanted f64, as q has", name, to_string(got));
  }
  return invalid_argument(
      "%s: dtype is %s; wanted %s, as q has, or an 8-bit type (e4m3, e5m2, int8 or byte)", name,
      to_string(got), to_string(q));
}

}  // namespace

Status describe_storage(const Tensors& t, Problem& p) noexcept {
  const DType q = t.q.dtype;
  if (!is_float(q) && !is_8bit(q)) {
    return invalid_argument(
        "q: dtype is %s; wanted f64, f32, f16, bf16 or an 8-bit type (e4m3, e5m2, int8 or byte)",
        to_string(q));
  }
  p.dtype = !is_8bit(q) ? q : t.out.dtype == DType::bf16 ? DType::bf16 : DType::f16;
  if (is_8bit(q) && t.out.given() && is_8bit(t.out.dtype)) {
    return invalid_argument(
        "out: dtype is %s; wanted f16, bf16 or f32; use quantize() on the result",
        to_string(t.out.dtype));
  }
  return {};
}

Status describe_scale(const char* name, const TensorView& scale, std::int64_t batch,
                      std::int64_t heads, std::int64_t rows, std::int64_t block_rows,
                      const char* block_option, Layout& layout) noexcept {
  if (scale.rank == 1 && scale.shape[0] == 1) {
    FLASHCORE_RETURN_IF_ERROR(check_view(name, scale));
    layout = layout_of(scale, {-1, -1, -1, -1});
    return check_dtype(name, scale.dtype, DType::f32, DType::f32);
  }
  if (scale.rank != 2 && scale.rank != 3) {
    return invalid_argument(
        "%s: rank is %d%s; wanted [1], [batch, heads] or [batch, heads, blocks]", name, scale.rank,
        scale.rank == 1 ? " and it has more than one element" : "");
  }
  FLASHCORE_RETURN_IF_ERROR(check_view(name, scale));
  FLASHCORE_RETURN_IF_ERROR(check_dtype(name, scale.dtype, DType::f32, DType::f32));
  FLASHCORE_RETURN_IF_ERROR(check_extent(name, "batch", scale.shape[0], batch, "its tensor"));
  FLASHCORE_RETURN_IF_ERROR(check_extent(name, "heads", scale.shape[1], heads, "its tensor"));
  if (scale.rank == 3) {
    if (block_rows < 1) {
      return invalid_argument(
          "%s is %lld; %s is [batch, heads, blocks], so it must say how many rows share a scale",
          block_option, ll{block_rows}, name);
    }
    const std::int64_t blocks = rows / block_rows + (rows % block_rows != 0 ? 1 : 0);
    if (scale.shape[2] < blocks) {
      return invalid_argument("%s: has %lld blocks; %lld rows in blocks of %lld (%s) need %lld",
                              name, ll{scale.shape[2]}, ll{rows}, ll{block_rows}, block_option,
                              ll{blocks});
    }
  }
  layout = layout_of(scale, {0, 1, scale.rank == 3 ? 2 : -1, -1});
  return {};
}

Status find_scales(const Tensors& t, Problem& p) noexcept {
  FLASHCORE_RETURN_IF_ERROR(check_storage("k", t.k.dtype, t.q.dtype));
  FLASHCORE_RETURN_IF_ERROR(check_storage("v", t.v.dtype, t.q.dtype));
  if (!t.q_scale.given() && !t.k_scale.given() && !t.v_scale.given()) return {};
  const Options& o = p.options;
  const struct {
    const char* name;
    const char* of;
    const TensorView &scale, &tensor;
    std::int64_t heads, rows, block_rows;
    const char* block_option;
    Layout& layout;
  } all[] = {{"q_scale", "q", t.q_scale, t.q, p.q_heads, p.q_len, o.q_scale_block, "q_scale_block",
              p.q_scale},
             {"k_scale", "k", t.k_scale, t.k, p.kv_heads, p.kv_len, o.kv_scale_block,
              "kv_scale_block", p.k_scale},
             {"v_scale", "v", t.v_scale, t.v, p.kv_heads, p.kv_len, o.kv_scale_block,
              "kv_scale_block", p.v_scale}};
  for (const auto& one : all) {
    if (!one.scale.given()) continue;
    if (!is_8bit(one.tensor.dtype)) {
      return invalid_argument(
          "%s: given, but %s is %s; only 8-bit tensors have a scale, leave it out", one.name,
          one.of, to_string(one.tensor.dtype));
    }
    FLASHCORE_RETURN_IF_ERROR(describe_scale(one.name, one.scale, p.batch, one.heads, one.rows,
                                             one.block_rows, one.block_option, one.layout));
  }
  return {};
}

}  // namespace flashcore
