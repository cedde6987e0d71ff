#include "api/validate/backward.h"

#include <iterator>
#include <span>

#include "api/validate/kv.h"
#include "api/validate/problem.h"
#include "api/validate/tensor.h"
#include "core/error.h"

namespace flashcore {
namespace {

constexpr Axes kDenseAxes{0, 1, 2, 3}, kVarlenAxes{-1, 1, 0, 2};

/// Refuses the calls that have no gradients.
Status check_differentiable(const Tensors& t) noexcept {
  if (t.block_table.given()) {
    return unsupported(
        "block_table: gradients through pages are not supported; gather the pages into k and v "
        "first");
  }
  if (t.mask_blocks.given()) {
    return unsupported(
        "mask_blocks: gradients with a block mask are not supported; give it as a boolean mask "
        "(expand_block_mask(), in Python BlockMask.to_dense())");
  }
  const NamedView operands[] = {{"q", &t.q}, {"k", &t.k}, {"v", &t.v}};
  for (const auto& [name, view] : operands) {
    if (is_8bit(view->dtype)) {
      return unsupported(
          "%s: dtype is %s; gradients are computed for f32, f16 and bf16, on CPUs also f64; "
          "dequantize() it first",
          name, to_string(view->dtype));
    }
  }
  if (!t.lse.given()) {
    return invalid_argument(
        "lse: not given; gradients need the forward's LSE (in Python return_lse=True)");
  }
  return {};
}

/// Checks that a gradient has the shape of its tensor `of` and one of two types.
Status check_like(const char* name, const TensorView& t, const char* of, const TensorView& like,
                  DType wanted, DType alternative) noexcept {
  static constexpr const char* kAxes[] = {"extent 0", "extent 1", "extent 2", "extent 3"};
  if (t.rank != like.rank) {
    return t.rank == 0 ? invalid_argument("%s: not given; wanted the shape of %s", name, of)
                       : invalid_argument("%s: rank is %d, %s has %d; they must match", name,
                                          t.rank, of, like.rank);
  }
  FLASHCORE_RETURN_IF_ERROR(check_view(name, t));
  for (int i = 0; i < t.rank; ++i) {
    FLASHCORE_RETURN_IF_ERROR(check_extent(name, kAxes[i], t.shape[i], like.shape[i], of));
  }
  return check_dtype(name, t.dtype, wanted, alternative);
}

Status describe_lse_gradient(const Tensors& t, const Gradients& g, BackwardProblem& p) noexcept {
  FLASHCORE_RETURN_IF_ERROR(check_like("dlse", g.dlse, "lse", t.lse, t.lse.dtype, t.lse.dtype));
  p.dlse = layout_of(g.dlse, p.forward.q_varlen ? Axes{-1, 0, 1, -1} : Axes{0, 1, 2, -1});
  return {};
}

Status describe_bias_gradient(const Tensors& t, const Gradients& g, BackwardProblem& p) noexcept {
  if (!t.bias.given()) {
    return invalid_argument("dbias: given, but the call has no bias");
  }
  FLASHCORE_RETURN_IF_ERROR(
      check_like("dbias", g.dbias, "bias", t.bias, p.forward.dtype, DType::f32));
  p.dbias = layout_of(g.dbias, kDenseAxes);
  p.dbias_batch = g.dbias.shape[0];
  p.dbias_heads = g.dbias.shape[1];
  p.dbias_rows = g.dbias.shape[2];
  return {};
}

Status describe_sinks_gradient(const Tensors& t, const Gradients& g, BackwardProblem& p) noexcept {
  if (!t.sinks.given()) {
    return invalid_argument("dsinks: given, but the call has no sinks");
  }
  FLASHCORE_RETURN_IF_ERROR(
      check_like("dsinks", g.dsinks, "sinks", t.sinks, DType::f32, DType::f32));
  p.dsinks = layout_of(g.dsinks, {-1, 0, -1, -1});
  return {};
}

}  // namespace

Status describe_backward(const Tensors& t, const Gradients& g, const Options& options,
                         BackwardProblem& p) noexcept {
  FLASHCORE_RETURN_IF_ERROR(check_differentiable(t));
  FLASHCORE_RETURN_IF_ERROR(describe(t, options, p.forward));
  const DType dtype = p.forward.dtype;
  const Axes q_axes = p.forward.q_varlen ? kVarlenAxes : kDenseAxes;
  const Axes k_axes = p.forward.kv_varlen ? kVarlenAxes : kDenseAxes;
  FLASHCORE_RETURN_IF_ERROR(check_like("dout", g.dout, "out", t.out, dtype, DType::f32));
  p.dout = layout_of(g.dout, q_axes);
  const struct {
    const char *name, *of;
    const TensorView &gradient, &tensor;
    Axes axes;
    Layout& layout;
  } operands[] = {{"dq", "q", g.dq, t.q, q_axes, p.dq},
                  {"dk", "k", g.dk, t.k, k_axes, p.dk},
                  {"dv", "v", g.dv, t.v, k_axes, p.dv}};
  for (const auto& [name, of, gradient, tensor, axes, layout] : operands) {
    if (!gradient.given()) continue;
    FLASHCORE_RETURN_IF_ERROR(check_like(name, gradient, of, tensor, dtype, DType::f32));
    layout = layout_of(gradient, axes);
  }
  if (g.dlse.given()) FLASHCORE_RETURN_IF_ERROR(describe_lse_gradient(t, g, p));
  if (g.dbias.given()) FLASHCORE_RETURN_IF_ERROR(describe_bias_gradient(t, g, p));
  if (g.dsinks.given()) FLASHCORE_RETURN_IF_ERROR(describe_sinks_gradient(t, g, p));
  return {};
}

Status check_backward_memory(const Tensors& t, const Gradients& g) noexcept {
  const NamedView all[] = {{"q", &t.q},
                           {"k", &t.k},
                           {"v", &t.v},
                           {"out", &t.out},
                           {"lse", &t.lse},
                           {"bias", &t.bias},
                           {"mask", &t.mask},
                           {"alibi_slopes", &t.alibi_slopes},
                           {"sinks", &t.sinks},
                           {"cu_seqlens_q", &t.cu_seqlens_q},
                           {"cu_seqlens_k", &t.cu_seqlens_k},
                           {"seqused_k", &t.seqused_k},
                           {"q_start", &t.q_start},
                           {"k_start", &t.k_start},
                           {"dout", &g.dout},
                           {"dlse", &g.dlse},
                           {"dq", &g.dq},
                           {"dk", &g.dk},
                           {"dv", &g.dv},
                           {"dbias", &g.dbias},
                           {"dsinks", &g.dsinks}};
  constexpr std::size_t kInputs = std::size(all) - 5;
  for (const auto& [name, view] : all) {
    if (!view->given()) continue;
    FLASHCORE_RETURN_IF_ERROR(check_device(name, view->device, t.q.device));
    FLASHCORE_RETURN_IF_ERROR(check_pointer(name, *view));
  }
  return check_outputs(std::span(all).subspan(kInputs), std::span(all).first(kInputs));
}

Status check_against_backward_plan(const BackwardProblem& planned,
                                   const BackwardProblem& given) noexcept {
  FLASHCORE_RETURN_IF_ERROR(check_against_plan(planned.forward, given.forward));
  BackwardProblem adjusted = given;
  adjusted.forward = planned.forward;
  for (Layout BackwardProblem::*layout :
       {&BackwardProblem::dout, &BackwardProblem::dlse, &BackwardProblem::dq, &BackwardProblem::dk,
        &BackwardProblem::dv, &BackwardProblem::dbias, &BackwardProblem::dsinks}) {
    (adjusted.*layout).alignment_bytes = (planned.*layout).alignment_bytes;
  }
  if (planned == adjusted) return {};
  return invalid_argument(
      "run_backward: the gradients are not those of the plan (another shape, stride or type, or "
      "one "
      "more or fewer); make a plan for these");
}

}  // namespace flashcore
