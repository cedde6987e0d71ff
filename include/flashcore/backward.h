// Gradients of attention.
//
//   flashcore::Gradients gradients{.dout = dout, .dq = dq, .dk = dk, .dv = dv};
//   auto problem = flashcore::make_backward_problem(tensors, gradients, {.causal = true});
//   auto plan = flashcore::make_backward_plan(*problem, *flashcore::device_info({}));
//   flashcore::Workspace workspace{buffer, flashcore::workspace_bytes(*plan)};
//   flashcore::run_backward(*plan, tensors, gradients, workspace);   // any number of times
//
// `tensors` are those of the forward call. Its out and lse are inputs here, and lse is required.
// The same call gives the same bits for any number of threads. docs/numerics.md defines every
// gradient and the bound on its error.
#pragma once

#include <string>

#include "flashcore/attention.h"

namespace flashcore {

/// The gradients of one call. dout and dlse are read, the others written. A gradient that is not
/// given is not computed. Every element of a given one is written: keys past seqused_k, queries
/// without keys and varlen rows that belong to no sequence get 0.
struct Gradients {
  TensorView dout{};            ///< of out, in its shape: q's type or f32
  TensorView dlse{};            ///< of lse, in its shape and type; not given: 0
  TensorView dq{}, dk{}, dv{};  ///< in the shapes of q, k and v: q's type or f32
  TensorView dbias{};           ///< in the shape of bias: q's type or f32
  TensorView dsinks{};          ///< f32 [q_heads]; 0 for a partial result
};

/// A Problem and the layouts of its gradients.
struct BackwardProblem {
  Problem forward;
  Layout dout, dlse, dq, dk, dv, dbias, dsinks;
  /// Extents of dbias; an extent of 1 is summed over the dimension that the bias repeats.
  std::int64_t dbias_batch = 0, dbias_heads = 0, dbias_rows = 0;

  bool operator==(const BackwardProblem&) const = default;
};

/// Validates a call. Reads no tensor data. Paged and 8-bit k and v have no gradients.
FLASHCORE_API Result<BackwardProblem> make_backward_problem(const Tensors& tensors,
                                                            const Gradients& gradients,
                                                            const Options& options) noexcept;

struct BackwardPlan {
  BackwardProblem problem;
  DeviceInfo device;
  const KernelInfo* kernel = nullptr;
  std::int32_t tile_q = 0;      ///< query rows per work tile
  std::int32_t tile_k = 0;      ///< keys per work tile
  std::int32_t dbias_keys = 0;  ///< CUDA: keys of a tile of dbias, which has tile_q rows
  /// Ranges of KV tiles that are computed independently, for parallelism. dq is their sum.
  std::int32_t key_chunks = 0;
  std::int32_t tiles_per_chunk = 1;
  /// Rows with a large LSE find their maximum and sum again, from the keys of the call. False if
  /// out and lse cover more keys than the call has, as in a step of a ring; the caller may set it.
  bool exact_stats = false;
  // Byte offsets into the workspace. The header comes first.
  std::size_t row_stats_offset = 0;     ///< [3, batch, q_heads, q_len]: base, factor and delta
  std::size_t dq_partials_offset = 0;   ///< [key_chunks, query tiles, head_dim, tile_q]
  std::size_t dq_turns_offset = 0;      ///< [query tiles]: counters of additions to dq; 0: none
  std::size_t dout_largest_offset = 0;  ///< [3, batch, kv_heads]: bounds of dS; 0: not needed
  /// [batch, kv_heads], then a counter: heads with inputs that are not finite; 0: not needed
  std::size_t nonfinite_heads_offset = 0;
  std::size_t scratch_offset = 0;  ///< CPU: tiles of each thread
  std::size_t scratch_bytes_per_thread = 0;
  std::size_t workspace_bytes = kWorkspaceHeaderBytes;
};

/// Pure, as make_plan(). Options::kernel names a kernel of Operation::bwd; num_splits is ignored.
FLASHCORE_API Result<BackwardPlan> make_backward_plan(const BackwardProblem& problem,
                                                      const DeviceInfo& device) noexcept;

/// Bytes run_backward() needs for this plan, at 256-byte alignment. They need no initialisation,
/// unless the call is checked.
inline std::size_t workspace_bytes(const BackwardPlan& plan) noexcept {
  return plan.workspace_bytes;
}

/// The plan as text: kernel, tiles, workspace, work, and the reason against every other kernel.
FLASHCORE_API std::string explain(const BackwardPlan& plan);

/// Visible pairs, 2 * (3 * head_dim + 2 * v_dim) flops for each, and every tensor's bytes once.
FLASHCORE_API Cost cost(const BackwardProblem& problem) noexcept;

/// Computes the gradients. Allocates nothing. If the call fails, they are unchanged, unless it was
/// cancelled while it ran. `cancel`: as for run().
FLASHCORE_API Status run_backward(const BackwardPlan& plan, const Tensors& tensors,
                                  const Gradients& gradients, Workspace workspace,
                                  Stream stream = nullptr,
                                  const std::int32_t* cancel = nullptr) noexcept;

}  // namespace flashcore
