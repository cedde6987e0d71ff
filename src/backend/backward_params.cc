#include <algorithm>

#include "backend/backend.h"
#include "backend/params.h"

namespace flashcore {
namespace {

core::Strides gradient_strides(const Layout& layout) noexcept {
  return {layout.batch, layout.head, layout.row, layout.column};
}

void set_gradients(core::BackwardParams& p, const BackwardProblem& problem,
                   const Gradients& gradients) noexcept {
  p.dout = gradients.dout.data;
  p.dlse = gradients.dlse.data;
  p.dq = gradients.dq.data;
  p.dk = gradients.dk.data;
  p.dv = gradients.dv.data;
  p.dbias = gradients.dbias.data;
  p.dsinks = static_cast<float*>(gradients.dsinks.data);
  p.dout_strides = gradient_strides(problem.dout);
  p.dlse_strides = gradient_strides(problem.dlse);
  p.dq_strides = gradient_strides(problem.dq);
  p.dk_strides = gradient_strides(problem.dk);
  p.dv_strides = gradient_strides(problem.dv);
  p.dbias_strides = gradient_strides(problem.dbias);
  p.dsinks_stride = problem.dsinks.head;
  p.dout_element = element_of(problem.dout.dtype);
  p.dq_element = element_of(problem.dq.dtype);
  p.dk_element = element_of(problem.dk.dtype);
  p.dv_element = element_of(problem.dv.dtype);
  p.dbias_element = element_of(problem.dbias.dtype);
  p.dbias_batch = static_cast<std::int32_t>(problem.dbias_batch);
  p.dbias_heads = static_cast<std::int32_t>(problem.dbias_heads);
  p.dbias_rows = static_cast<std::int32_t>(problem.dbias_rows);
}

}  // namespace

core::BackwardParams make_backward_params(const BackwardPlan& plan, const Tensors& tensors,
                                          const Gradients& gradients,
                                          const Workspace& workspace) noexcept {
  const Problem& problem = plan.problem.forward;
  Plan forward;
  forward.problem = problem;
  forward.device = plan.device;
  forward.kernel = plan.kernel;
  forward.tile_q = plan.tile_q;
  forward.tile_k = plan.tile_k;
  forward.keys_per_split = problem.kv_len;
  core::BackwardParams p{};
  p.fwd = make_params(forward, tensors, workspace);
  p.group = p.fwd.group;
  p.fwd.group = 1;
  set_gradients(p, plan.problem, gradients);
  p.scale = problem.scale;
  p.async_dout = plan.problem.dout.column == 1 && plan.problem.dout.alignment_bytes >= 16;
  p.fast_path = p.fwd.async_rows && p.async_dout &&
                (p.fwd.score_mods & (core::kElementMods | core::kMaskMod)) == 0;
  p.k_tiles = (p.fwd.kv_len + plan.tile_k - 1) / plan.tile_k;
  // Offsets of the plan include the header, also if it is separate.
  const auto at = [&](std::size_t offset) {
    return static_cast<char*>(workspace.data) + offset -
           (workspace.header != nullptr ? kWorkspaceHeaderBytes : 0);
  };
  const std::size_t bytes = (plan.dq_partials_offset - plan.row_stats_offset) / 3;
  p.row_base = at(plan.row_stats_offset);
  p.row_factor = at(plan.row_stats_offset + bytes);
  p.row_delta = at(plan.row_stats_offset + 2 * bytes);
  p.exact_stats = plan.exact_stats;
  // Rounding to 16 bits hides more of an error of P.
  const DType probability = plan.kernel->probability_dtype;
  const bool rounds_p = probability == DType::f16 || probability == DType::bf16;
  p.largest_exact_lse = rounds_p ? 1024.f : 128.f;
  if (plan.dout_largest_offset != 0) {
    p.dout_largest = reinterpret_cast<std::uint32_t*>(at(plan.dout_largest_offset));
  }
  if (plan.nonfinite_heads_offset != 0) {
    p.nonfinite_heads = reinterpret_cast<std::uint32_t*>(at(plan.nonfinite_heads_offset));
  }
  p.dbias_keys = plan.dbias_keys;
  p.dq_partials = at(plan.dq_partials_offset);
  p.k_chunks = plan.key_chunks;
  p.chunk_tiles = plan.tiles_per_chunk;
  return p;
}

}  // namespace flashcore
