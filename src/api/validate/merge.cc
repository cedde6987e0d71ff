// Validation of merge().
#include <cstdio>

#include "api/validate/problem.h"
#include "api/validate/tensor.h"
#include "core/error.h"

namespace flashcore {

Status check_merge(std::span<const PartialResult> parts, const TensorView& out,
                   const TensorView& lse, const TensorView& sinks) noexcept {
  if (parts.empty() || parts.size() > kMaxMergeParts) {
    return invalid_argument("merge: got %zu parts; wanted 1 to %d (merge more in several steps)",
                            parts.size(), kMaxMergeParts);
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
  const bool varlen = out.rank == 3;
  NamedView inputs[2 * kMaxMergeParts + 1];
  std::size_t input_count = 0;
  char names[2 * kMaxMergeParts][32];
  const auto check_lse = [&](const char* name, const TensorView& t) noexcept -> Status {
    FLASHCORE_RETURN_IF_ERROR(check_rank(
        name, t, out.rank - 1, varlen ? "[q_heads, total_q]" : "[batch, q_heads, q_len]"));
    for (int i = 0; i + 1 < out.rank; ++i) {
      const int axis = varlen ? 1 - i : i;  // varlen: lse is [q_heads, total_q]
      FLASHCORE_RETURN_IF_ERROR(
          check_extent(name, "an extent", t.shape[i], out.shape[axis], "out"));
    }
    FLASHCORE_RETURN_IF_ERROR(check_dtype(name, t.dtype, wide, wide));
    FLASHCORE_RETURN_IF_ERROR(check_device(name, t.device, out.device));
    return check_pointer(name, t);
  };
  for (std::size_t n = 0; n < parts.size(); ++n) {
    const PartialResult& part = parts[n];
    char* out_name = names[2 * n];
    char* lse_name = names[2 * n + 1];
    std::snprintf(out_name, sizeof names[0], "merge: parts[%zu].out", n);
    std::snprintf(lse_name, sizeof names[0], "merge: parts[%zu].lse", n);
    FLASHCORE_RETURN_IF_ERROR(check_rank(out_name, part.out, out.rank, "like out"));
    for (int i = 0; i < out.rank; ++i) {
      FLASHCORE_RETURN_IF_ERROR(
          check_extent(out_name, "an extent", part.out.shape[i], out.shape[i], "out"));
    }
    FLASHCORE_RETURN_IF_ERROR(check_dtype(out_name, part.out.dtype, wide, wide));
    FLASHCORE_RETURN_IF_ERROR(check_device(out_name, part.out.device, out.device));
    FLASHCORE_RETURN_IF_ERROR(check_pointer(out_name, part.out));
    FLASHCORE_RETURN_IF_ERROR(check_lse(lse_name, part.lse));
    inputs[input_count++] = {out_name, &part.out};
    inputs[input_count++] = {lse_name, &part.lse};
  }
  if (lse.given()) FLASHCORE_RETURN_IF_ERROR(check_lse("merge: lse", lse));
  if (sinks.given()) {
    FLASHCORE_RETURN_IF_ERROR(check_rank("merge: sinks", sinks, 1, "[q_heads]"));
    FLASHCORE_RETURN_IF_ERROR(
        check_extent("merge: sinks", "length", sinks.shape[0], out.shape[1], "out's q_heads"));
    FLASHCORE_RETURN_IF_ERROR(check_dtype("merge: sinks", sinks.dtype, DType::f32, DType::f32));
    FLASHCORE_RETURN_IF_ERROR(check_device("merge: sinks", sinks.device, out.device));
    FLASHCORE_RETURN_IF_ERROR(check_pointer("merge: sinks", sinks));
    inputs[input_count++] = {"sinks", &sinks};
  }
  FLASHCORE_RETURN_IF_ERROR(check_pointer("merge: out", out));
  const NamedView outputs[] = {{"merge: out", &out}, {"merge: lse", &lse}};
  return check_outputs(outputs, std::span(inputs, input_count));
}

}  // namespace flashcore
