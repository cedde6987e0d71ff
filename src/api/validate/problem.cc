#include "api/validate/problem.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "api/validate/block_mask.h"
#include "api/validate/kv.h"
#include "api/validate/quant.h"
#include "api/validate/tensor.h"
#include "core/error.h"

namespace flashcore {
namespace {

constexpr std::int64_t kMaxHeadDim = 576;
constexpr std::int64_t kMaxLength = std::int64_t{1} << 30;  // positions fit 32 bits

using ll = long long;

/// The type of LSEs and of partial results.
DType wide_type(DType dtype) noexcept { return dtype == DType::f64 ? DType::f64 : DType::f32; }

/// Checks k and v, which are dense, varlen or paged.
Status describe_keys(const Tensors& t, Problem& p) noexcept {
  if (p.kv_varlen && t.block_table.given()) {
    return invalid_argument(
        "block_table: given together with cu_seqlens_k; k and v are either paged or varlen (the "
        "lengths of paged sequences are seqused_k)");
  }
  if (p.kv_varlen) {
    FLASHCORE_RETURN_IF_ERROR(check_rank("cu_seqlens_k", t.cu_seqlens_k, 1, "[batch + 1]"));
    FLASHCORE_RETURN_IF_ERROR(check_extent("cu_seqlens_k", "length - 1",
                                           t.cu_seqlens_k.shape[0] - 1, p.batch, "q's batch"));
  }
  const KvLayout layout = p.kv_varlen             ? KvLayout::varlen
                          : t.block_table.given() ? KvLayout::paged
                                                  : KvLayout::dense;
  KvShape kv;
  FLASHCORE_RETURN_IF_ERROR(parse_kv(t.k, t.v, t.block_table, layout, p.batch, "q", kv));
  FLASHCORE_RETURN_IF_ERROR(check_extent("k", "head_dim", kv.head_dim, p.head_dim, "q"));
  p.kv_heads = kv.kv_heads;
  p.kv_len = kv.kv_len;
  p.v_dim = kv.v_dim;
  p.total_k = kv.total_k;
  p.page_size = kv.page_size;
  p.pages = kv.pages;
  p.k = kv.k;
  p.v = kv.v;
  p.block_table = kv.block_table;
  return {};
}

/// Checks the shapes of q, k, v and out and derives the problem's sizes.
Status describe_main(const Tensors& t, Problem& p) noexcept {
  p.device = t.q.device;
  p.q_varlen = t.cu_seqlens_q.given();
  p.kv_varlen = t.cu_seqlens_k.given();
  FLASHCORE_RETURN_IF_ERROR(
      p.q_varlen ? check_rank("q", t.q, 3, "[total_q, q_heads, head_dim] (with cu_seqlens_q)")
                 : check_rank("q", t.q, 4, "[batch, q_heads, q_len, head_dim]"));
  FLASHCORE_RETURN_IF_ERROR(describe_storage(t, p));
  if (p.dtype == DType::f64 && p.device.type == DeviceType::cuda) {
    return unsupported("q: f64 runs on the CPU only; on a GPU use f32, f16 or bf16");
  }
  if (p.q_varlen) {
    FLASHCORE_RETURN_IF_ERROR(check_rank("cu_seqlens_q", t.cu_seqlens_q, 1, "[batch + 1]"));
    if (t.cu_seqlens_q.shape[0] < 1) {
      return invalid_argument("cu_seqlens_q: has no element; wanted batch + 1");
    }
    p.batch = t.cu_seqlens_q.shape[0] - 1;
    p.total_q = t.q.shape[0];
    p.q_len = p.total_q;
    p.q_heads = t.q.shape[1];
  } else {
    p.batch = t.q.shape[0];
    p.q_heads = t.q.shape[1];
    p.q_len = t.q.shape[2];
  }
  p.head_dim = t.q.shape[t.q.rank - 1];
  FLASHCORE_RETURN_IF_ERROR(describe_keys(t, p));
  FLASHCORE_RETURN_IF_ERROR(check_rank("out", t.out, t.q.rank, "like q"));
  for (int i = 0; i + 1 < t.out.rank; ++i) {
    static constexpr const char* kVarlen[] = {"total_q", "q_heads"};
    static constexpr const char* kDense[] = {"batch", "q_heads", "q_len"};
    FLASHCORE_RETURN_IF_ERROR(check_extent("out", p.q_varlen ? kVarlen[i] : kDense[i],
                                           t.out.shape[i], t.q.shape[i], "q"));
  }
  FLASHCORE_RETURN_IF_ERROR(
      check_extent("out", "v_dim", t.out.shape[t.out.rank - 1], p.v_dim, "v"));

  for (const auto& [name, dim] : {std::pair{"head_dim", p.head_dim}, {"v_dim", p.v_dim}}) {
    if (dim < 1 || dim > kMaxHeadDim) {
      return unsupported("%s is %lld; 1 to %lld are supported", name, ll{dim}, ll{kMaxHeadDim});
    }
  }
  if (p.q_heads > 0 && (p.kv_heads == 0 || p.q_heads % p.kv_heads != 0)) {
    return invalid_argument("q: q_heads is %lld, k has %lld kv_heads; q_heads must be a multiple",
                            ll{p.q_heads}, ll{p.kv_heads});
  }
  const Axes q_axes = p.q_varlen ? Axes{-1, 1, 0, 2} : Axes{0, 1, 2, 3};
  p.q = layout_of(t.q, q_axes);
  p.out = layout_of(t.out, q_axes);
  return {};
}

/// Scores are computed in f32, so scale, softcap and their quotient must be normal f32 numbers.
Status check_f32_factors(double scale, double softcap) noexcept {
  // Leaves room for factors of log2(e) and 2.
  constexpr double kSmallest = 1e-30, kLargest = 1e30;
  if (std::abs(scale) > kLargest) {
    return invalid_argument("scale is %g; scores are computed in f32, wanted at most %g", scale,
                            kLargest);
  }
  if (softcap != 0 && softcap < kSmallest) {
    return invalid_argument(
        "softcap is %g; scores are computed in f32, wanted 0 (none) or at least %g", softcap,
        kSmallest);
  }
  if (softcap != 0 && std::abs(scale) / softcap > kLargest) {
    return invalid_argument(
        "softcap is %g, scale is %g; scores are computed in f32, wanted scale / softcap of at most "
        "%g",
        softcap, scale, kLargest);
  }
  return {};
}

// One range check per option type of options.def.
Status check_number(const char* name, std::int64_t value, std::int64_t least,
                    const char* wanted) noexcept {
  if (value >= least) return {};
  return invalid_argument("%s is %lld; wanted %s", name, ll{value}, wanted);
}

Status check_number(const char* name, double value, double least, const char* wanted) noexcept {
  if (std::isfinite(value) && value >= least) return {};
  return invalid_argument("%s is %g; wanted %s", name, value, wanted);
}

Status check_number(const char* name, const std::optional<double>& value,
                    const char* wanted) noexcept {
  if (!value.has_value() || std::isfinite(*value)) return {};
  return invalid_argument("%s is %g; wanted %s", name, *value, wanted);
}

Status check_ranges(const Options& o) noexcept {
#define FLASHCORE_CHECK_flag(name, least, wanted) Status()
#define FLASHCORE_CHECK_choice(name, least, wanted) Status()
#define FLASHCORE_CHECK_text(name, least, wanted) Status()
#define FLASHCORE_CHECK_optional_f64(name, least, wanted) check_number(#name, o.name, wanted)
#define FLASHCORE_CHECK_f64(name, least, wanted) check_number(#name, o.name, double{least}, wanted)
#define FLASHCORE_CHECK_window(name, least, wanted) \
  check_number(#name, o.name, std::int64_t{least}, wanted)
#define FLASHCORE_CHECK_i64(name, least, wanted) \
  check_number(#name, o.name, std::int64_t{least}, wanted)
#define FLASHCORE_CHECK_i32(name, least, wanted) \
  check_number(#name, std::int64_t{o.name}, std::int64_t{least}, wanted)
#define FLASHCORE_OPTION(name, type, initial, least, wanted, role, word, doc) \
  FLASHCORE_RETURN_IF_ERROR(FLASHCORE_CHECK_##type(name, least, wanted));
#include "api/options.def"
  return {};
}

Status describe_options(const Tensors& t, const Options& o, Problem& p) noexcept {
  p.options = o;
  FLASHCORE_RETURN_IF_ERROR(check_ranges(o));
  p.scale = o.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  if (p.dtype != DType::f64) FLASHCORE_RETURN_IF_ERROR(check_f32_factors(p.scale, o.softcap));
  if (o.reproducibility == Reproducibility::batch_invariant && o.num_splits > 1) {
    return invalid_argument(
        "num_splits is %d; a batch-invariant plan fixes its own splits, wanted 0", o.num_splits);
  }
  if (p.q_varlen && o.max_q_len > 0) p.q_len = std::min(p.q_len, o.max_q_len);
  if (p.kv_varlen && o.max_kv_len > 0) p.kv_len = std::min(p.kv_len, o.max_kv_len);
  for (const auto& [name, length] : {std::pair{"q_len", p.q_len}, {"kv_len", p.kv_len}}) {
    if (length > kMaxLength) {
      return unsupported("%s is %lld; at most %lld is supported", name, ll{length}, ll{kMaxLength});
    }
  }
  if (o.partial) {
    const DType wide = wide_type(p.dtype);
    FLASHCORE_RETURN_IF_ERROR(check_dtype("out (partial)", t.out.dtype, wide, wide));
    if (!t.lse.given()) {
      return invalid_argument("lse: not given; a partial result needs it for merge()");
    }
  }
  return check_dtype("out", t.out.dtype, p.dtype, DType::f32);
}

/// Checks bias or mask: [batch|1, q_heads|1, q_len|1, kv_len].
Status describe_score_tensor(const char* name, const TensorView& t, const Problem& p,
                             Layout& layout) noexcept {
  FLASHCORE_RETURN_IF_ERROR(
      check_rank(name, t, 4, "[batch or 1, q_heads or 1, q_len or 1, kv_len]"));
  const std::int64_t wanted[4] = {p.batch, p.q_heads, p.q_len, p.kv_len};
  static constexpr const char* kNames[4] = {"batch", "q_heads", "q_len", "kv_len"};
  for (int i = 0; i < 4; ++i) {
    if (t.shape[i] == wanted[i] || (i < 3 && t.shape[i] == 1)) continue;
    return invalid_argument("%s: %s is %lld; wanted %lld%s", name, kNames[i], ll{t.shape[i]},
                            ll{wanted[i]}, i < 3 ? " or 1" : "");
  }
  layout = layout_of(t, {0, 1, 2, 3});
  return {};
}

/// Checks a tensor with one i32 per sequence.
Status describe_per_sequence(const char* name, const TensorView& t, const Problem& p,
                             Layout& layout) noexcept {
  FLASHCORE_RETURN_IF_ERROR(check_rank(name, t, 1, "[batch]"));
  FLASHCORE_RETURN_IF_ERROR(check_dtype(name, t.dtype, DType::i32, DType::i32));
  FLASHCORE_RETURN_IF_ERROR(check_extent(name, "length", t.shape[0], p.batch, "q's batch"));
  layout = layout_of(t, {0, -1, -1, -1});
  return {};
}

Status check_cu_seqlens(const char* name, const TensorView& t) noexcept {
  FLASHCORE_RETURN_IF_ERROR(check_dtype(name, t.dtype, DType::i32, DType::i32));
  if (t.shape[0] > 1 && t.strides[0] != 1) {
    return invalid_argument("%s: stride is %lld; it must be contiguous", name, ll{t.strides[0]});
  }
  return {};
}

Status describe_lse(const TensorView& lse, Problem& p) noexcept {
  if (p.q_varlen) {
    FLASHCORE_RETURN_IF_ERROR(check_rank("lse", lse, 2, "[q_heads, total_q]"));
    FLASHCORE_RETURN_IF_ERROR(check_extent("lse", "q_heads", lse.shape[0], p.q_heads, "q"));
    FLASHCORE_RETURN_IF_ERROR(check_extent("lse", "total_q", lse.shape[1], p.total_q, "q"));
    p.lse = layout_of(lse, {-1, 0, 1, -1});
  } else {
    FLASHCORE_RETURN_IF_ERROR(check_rank("lse", lse, 3, "[batch, q_heads, q_len]"));
    FLASHCORE_RETURN_IF_ERROR(check_extent("lse", "batch", lse.shape[0], p.batch, "q"));
    FLASHCORE_RETURN_IF_ERROR(check_extent("lse", "q_heads", lse.shape[1], p.q_heads, "q"));
    FLASHCORE_RETURN_IF_ERROR(check_extent("lse", "q_len", lse.shape[2], p.q_len, "q"));
    p.lse = layout_of(lse, {0, 1, 2, -1});
  }
  return check_dtype("lse", lse.dtype, wide_type(p.dtype), wide_type(p.dtype));
}

Status describe_alibi(const TensorView& slopes, Problem& p) noexcept {
  const int rank = slopes.rank == 2 ? 2 : 1;
  FLASHCORE_RETURN_IF_ERROR(
      check_rank("alibi_slopes", slopes, rank, "[q_heads] or [batch, q_heads]"));
  if (rank == 2) {
    FLASHCORE_RETURN_IF_ERROR(check_extent("alibi_slopes", "batch", slopes.shape[0], p.batch, "q"));
  }
  FLASHCORE_RETURN_IF_ERROR(
      check_extent("alibi_slopes", "q_heads", slopes.shape[rank - 1], p.q_heads, "q"));
  FLASHCORE_RETURN_IF_ERROR(check_dtype("alibi_slopes", slopes.dtype, DType::f32, DType::f32));
  p.alibi_slopes = layout_of(slopes, {rank == 2 ? 0 : -1, rank - 1, -1, -1});
  return {};
}

Status describe_sinks(const TensorView& sinks, Problem& p) noexcept {
  FLASHCORE_RETURN_IF_ERROR(check_rank("sinks", sinks, 1, "[q_heads]"));
  FLASHCORE_RETURN_IF_ERROR(check_extent("sinks", "length", sinks.shape[0], p.q_heads, "q"));
  FLASHCORE_RETURN_IF_ERROR(check_dtype("sinks", sinks.dtype, DType::f32, DType::f32));
  p.sinks = layout_of(sinks, {-1, 0, -1, -1});
  return {};
}

Status describe_optional(const Tensors& t, Problem& p) noexcept {
  if (t.lse.given()) FLASHCORE_RETURN_IF_ERROR(describe_lse(t.lse, p));
  if (t.bias.given()) {
    FLASHCORE_RETURN_IF_ERROR(describe_score_tensor("bias", t.bias, p, p.bias));
    FLASHCORE_RETURN_IF_ERROR(check_dtype("bias", t.bias.dtype, p.dtype, DType::f32));
  }
  if (t.mask.given()) {
    FLASHCORE_RETURN_IF_ERROR(describe_score_tensor("mask", t.mask, p, p.mask));
    FLASHCORE_RETURN_IF_ERROR(check_dtype("mask", t.mask.dtype, DType::boolean, DType::boolean));
  }
  FLASHCORE_RETURN_IF_ERROR(describe_block_mask(t, p));
  if (t.alibi_slopes.given()) FLASHCORE_RETURN_IF_ERROR(describe_alibi(t.alibi_slopes, p));
  if (t.sinks.given()) FLASHCORE_RETURN_IF_ERROR(describe_sinks(t.sinks, p));
  if (p.q_varlen) FLASHCORE_RETURN_IF_ERROR(check_cu_seqlens("cu_seqlens_q", t.cu_seqlens_q));
  if (p.kv_varlen) FLASHCORE_RETURN_IF_ERROR(check_cu_seqlens("cu_seqlens_k", t.cu_seqlens_k));
  if (t.seqused_k.given()) {
    FLASHCORE_RETURN_IF_ERROR(describe_per_sequence("seqused_k", t.seqused_k, p, p.seqused_k));
  }
  if (t.q_start.given()) {
    FLASHCORE_RETURN_IF_ERROR(describe_per_sequence("q_start", t.q_start, p, p.q_start));
  }
  if (t.k_start.given()) {
    FLASHCORE_RETURN_IF_ERROR(describe_per_sequence("k_start", t.k_start, p, p.k_start));
  }
  return {};
}

}  // namespace

Status describe(const Tensors& tensors, const Options& options, Problem& problem) noexcept {
  FLASHCORE_RETURN_IF_ERROR(describe_main(tensors, problem));
  FLASHCORE_RETURN_IF_ERROR(describe_options(tensors, options, problem));
  FLASHCORE_RETURN_IF_ERROR(find_scales(tensors, problem));
  return describe_optional(tensors, problem);
}

Status check_memory(const Tensors& t) noexcept {
  static constexpr struct {
    const char* name;
    TensorView Tensors::*tensor;
  } kInputs[] = {
#define FLASHCORE_INPUT_main(name) {#name, &Tensors::name},
#define FLASHCORE_INPUT_optional(name) {#name, &Tensors::name},
#define FLASHCORE_INPUT_offsets(name) {#name, &Tensors::name},
#define FLASHCORE_INPUT_scale(name) {#name, &Tensors::name},
#define FLASHCORE_INPUT_block_mask(name) {#name, &Tensors::name},
#define FLASHCORE_INPUT_output(name)
#define FLASHCORE_TENSOR(field, name, shape, type, role, word, doc) FLASHCORE_INPUT_##role(name)
#include "api/options.def"
  };
  // The inputs that are given, then the outputs.
  NamedView views[std::size(kInputs) + 2];
  std::size_t count = 0;
  for (const auto& [name, tensor] : kInputs) {
    if ((t.*tensor).given()) views[count++] = {name, &(t.*tensor)};
  }
  const std::span<const NamedView> inputs(views, count);
  views[count++] = {"out", &t.out};
  if (t.lse.given()) views[count++] = {"lse", &t.lse};
  for (const auto& [name, view] : std::span(views, count)) {
    FLASHCORE_RETURN_IF_ERROR(check_device(name, view->device, t.q.device));
    FLASHCORE_RETURN_IF_ERROR(check_pointer(name, *view));
  }
  return check_outputs(std::span(views, count).subspan(inputs.size()), inputs);
}

Status check_against_plan(const Problem& planned, const Problem& given) noexcept {
  if (planned == given) return {};
  // Better alignment than planned is valid.
  Problem adjusted = given;
#define FLASHCORE_LAYOUT_main(name) &Problem::name,
#define FLASHCORE_LAYOUT_output(name) &Problem::name,
#define FLASHCORE_LAYOUT_optional(name) &Problem::name,
#define FLASHCORE_LAYOUT_scale(name) &Problem::name,
#define FLASHCORE_LAYOUT_block_mask(name) &Problem::name,
#define FLASHCORE_LAYOUT_offsets(name)
#define FLASHCORE_TENSOR(field, name, shape, type, role, word, doc) FLASHCORE_LAYOUT_##role(name)
  for (Layout Problem::*layout : {
#include "api/options.def"
       }) {
    if ((adjusted.*layout).alignment_bytes > (planned.*layout).alignment_bytes) {
      (adjusted.*layout).alignment_bytes = (planned.*layout).alignment_bytes;
    }
  }
  if (planned == adjusted) return {};
  return invalid_argument(
      "run: the tensors are not those of the plan (another shape, stride, type or device, a tensor "
      "more or fewer, or a less aligned pointer); make a plan for these");
}

}  // namespace flashcore
