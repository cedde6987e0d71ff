// Validation of merge().
#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "api/validate/problem.h"
#include "api/validate/tensor.h"
#include "core/error.h"

namespace flashcore {

namespace {

/// The results of merge() and the type of the partial results.
struct MergeOutputs {
  const TensorView& out;
  const TensorView& lse;
  DType wide;

  bool varlen() const noexcept { return out.rank == 3; }
};

Status check_merge_lse(const char* name, const TensorView& t, const MergeOutputs& to) noexcept {
  FLASHCORE_RETURN_IF_ERROR(check_rank(
      name, t, to.out.rank - 1, to.varlen() ? "[q_heads, total_q]" : "[batch, q_heads, q_len]"));
  for (int i = 0; i + 1 < to.out.rank; ++i) {
    const int axis = to.varlen() ? 1 - i : i;  // varlen: lse is [q_heads, total_q]
    FLASHCORE_RETURN_IF_ERROR(
        check_extent(name, "an extent", t.shape[i], to.out.shape[axis], "out"));
  }
  FLASHCORE_RETURN_IF_ERROR(check_dtype(name, t.dtype, to.wide, to.wide));
  FLASHCORE_RETURN_IF_ERROR(check_device(name, t.device, to.out.device));
  return check_pointer(name, t);
}

Status check_merge_out(const char* name, const TensorView& t, const MergeOutputs& to) noexcept {
  FLASHCORE_RETURN_IF_ERROR(check_rank(name, t, to.out.rank, "like out"));
  for (int i = 0; i < to.out.rank; ++i) {
    FLASHCORE_RETURN_IF_ERROR(check_extent(name, "an extent", t.shape[i], to.out.shape[i], "out"));
  }
  FLASHCORE_RETURN_IF_ERROR(check_dtype(name, t.dtype, to.wide, to.wide));
  FLASHCORE_RETURN_IF_ERROR(check_device(name, t.device, to.out.device));
  return check_pointer(name, t);
}

Status check_merge_sinks(const TensorView& sinks, const TensorView& out) noexcept {
  FLASHCORE_RETURN_IF_ERROR(check_rank("merge: sinks", sinks, 1, "[q_heads]"));
  FLASHCORE_RETURN_IF_ERROR(
      check_extent("merge: sinks", "length", sinks.shape[0], out.shape[1], "out's q_heads"));
  FLASHCORE_RETURN_IF_ERROR(check_dtype("merge: sinks", sinks.dtype, DType::f32, DType::f32));
  FLASHCORE_RETURN_IF_ERROR(check_device("merge: sinks", sinks.device, out.device));
  return check_pointer("merge: sinks", sinks);
}

constexpr std::size_t kPartsPerCheck = 32;

/// Checks up to kPartsPerCheck partial results, which begin with number `first`: their tensors, or,
/// with `overlap`, whether a result overlaps one of them.
Status check_merge_parts(std::span<const PartialResult> parts, std::size_t first,
                         const MergeOutputs& to, bool overlap) noexcept {
  NamedView inputs[2 * kPartsPerCheck];
  char names[2 * kPartsPerCheck][32];
  for (std::size_t n = 0; n < parts.size(); ++n) {
    char* out_name = names[2 * n];
    char* lse_name = names[2 * n + 1];
    std::snprintf(out_name, sizeof names[0], "merge: parts[%zu].out", first + n);
    std::snprintf(lse_name, sizeof names[0], "merge: parts[%zu].lse", first + n);
    if (!overlap) {
      FLASHCORE_RETURN_IF_ERROR(check_merge_out(out_name, parts[n].out, to));
      FLASHCORE_RETURN_IF_ERROR(check_merge_lse(lse_name, parts[n].lse, to));
    }
    inputs[2 * n] = {out_name, &parts[n].out};
    inputs[2 * n + 1] = {lse_name, &parts[n].lse};
  }
  if (!overlap) return {};
  const NamedView outputs[] = {{"merge: out", &to.out}, {"merge: lse", &to.lse}};
  return check_outputs(outputs, std::span(inputs, 2 * parts.size()));
}

/// Checks all partial results in groups, so that their names need no memory.
Status check_merge_groups(std::span<const PartialResult> parts, const MergeOutputs& to,
                          bool overlap) noexcept {
  for (std::size_t first = 0; first < parts.size(); first += kPartsPerCheck) {
    const std::size_t count = std::min(kPartsPerCheck, parts.size() - first);
    FLASHCORE_RETURN_IF_ERROR(check_merge_parts(parts.subspan(first, count), first, to, overlap));
  }
  return {};
}

}  // namespace

Status check_merge(std::span<const PartialResult> parts, const TensorView& out,
                   const TensorView& lse, const TensorView& sinks) noexcept {
  if (parts.empty() || parts.size() > INT32_MAX) {
    return invalid_argument("merge: got %zu parts; wanted 1 to %d", parts.size(), INT32_MAX);
  }
  if (out.rank != 4 && out.rank != 3) {
    return invalid_argument(
        "merge: out: rank is %d; wanted 4 [batch, q_heads, q_len, v_dim] or 3 "
        "[total_q, q_heads, v_dim]",
        out.rank);
  }
  if (!is_float(out.dtype)) {
    return invalid_argument("merge: out: dtype is %s; wanted f64, f32, f16 or bf16",
                            to_string(out.dtype));
  }
  FLASHCORE_RETURN_IF_ERROR(check_view("merge: out", out));
  const DType wide = parts[0].out.dtype;
  if (wide != DType::f32 && wide != DType::f64) {
    return invalid_argument("merge: parts[0].out: dtype is %s; wanted f32 (f64 for f64 problems)",
                            to_string(wide));
  }
  const MergeOutputs to{out, lse, wide};
  FLASHCORE_RETURN_IF_ERROR(check_merge_groups(parts, to, false));
  if (lse.given()) FLASHCORE_RETURN_IF_ERROR(check_merge_lse("merge: lse", lse, to));
  if (sinks.given()) FLASHCORE_RETURN_IF_ERROR(check_merge_sinks(sinks, out));
  FLASHCORE_RETURN_IF_ERROR(check_pointer("merge: out", out));
  FLASHCORE_RETURN_IF_ERROR(check_merge_groups(parts, to, true));
  const NamedView outputs[] = {{"merge: out", &out}, {"merge: lse", &lse}};
  const NamedView inputs[] = {{"sinks", &sinks}};
  return sinks.given() ? check_outputs(outputs, inputs) : Status();
}

}  // namespace flashcore
