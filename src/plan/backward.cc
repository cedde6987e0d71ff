// make_backward_plan(), explain() and cost() of gradients.
#include "plan/backward.h"

#include <algorithm>
#include <cstdio>

#include "core/backward_scratch.h"
#include "core/backward_traits.h"
#include "core/error.h"
#include "core/softcap.h"
#include "plan/divide.h"
#include "plan/problem_line.h"

namespace flashcore {
namespace {

using ll = long long;

constexpr std::size_t kBackwardAlignment = 256;
constexpr double kMaxBackwardElements = 0x1p56;

std::size_t aligned_bytes(std::size_t bytes) noexcept {
  return (bytes + kBackwardAlignment - 1) / kBackwardAlignment * kBackwardAlignment;
}

/// Rows of q, over all heads.
std::int64_t query_rows(const Problem& p) noexcept {
  return p.q_heads * (p.q_varlen ? p.total_q : p.batch * p.q_len);
}

Status find_forced(const BackwardProblem& problem, const DeviceInfo& device,
                   const KernelInfo*& found) noexcept {
  const char* id = problem.forward.options.kernel;
  const KernelInfo* kernel = find_kernel(id);
  if (kernel == nullptr) {
    return invalid_argument("kernel is \"%s\"; no kernel has this id, see flashcore info --kernels",
                            id);
  }
  const Reject reject = supports_backward(*kernel, problem, device);
  if (reject == Reject::none) {
    found = kernel;
    return {};
  }
  try {
    return unsupported("kernel %s cannot run this problem: it %s", id,
                       to_message(reject, *kernel, problem.forward, device).c_str());
  } catch (...) {
    return out_of_memory();
  }
}

/// A fused kernel has five products where the others have seven, but its CTAs wait for each other.
/// On an H200 it is faster for these calls (docs/experiments/sm90.md).
bool prefers_fused(const BackwardProblem& problem) noexcept {
  const Problem& p = problem.forward;
  if (p.options.reproducibility == Reproducibility::batch_invariant) return false;
  if (p.q_varlen || p.kv_varlen) return false;
  const Options& o = p.options;
  const bool masked = o.causal || o.window_left >= 0 || o.window_right >= 0;
  constexpr std::int64_t kDim = 96;     // smaller ones have kernels of their own
  constexpr std::int64_t kTiles = 512;  // fewer work tiles end unevenly
  const std::int64_t tiles = p.batch * p.kv_heads * ceil_div(p.kv_len, core::kFusedTileRows);
  return std::max(p.head_dim, p.v_dim) > kDim && tiles >= kTiles &&
         std::min(p.q_len, p.kv_len) >= (masked ? 2048 : 1024);
}

Status find_backward_kernel(const BackwardProblem& problem, const DeviceInfo& device,
                            const KernelInfo*& found) noexcept {
  const Problem& p = problem.forward;
  if (p.options.kernel != nullptr) return find_forced(problem, device, found);
  found = nullptr;
  // Of a family, the widest instruction set comes first; on a GPU, small dims.
  for (const Family family : families_of(device.device.type)) {
    for (const KernelInfo& kernel : kernels_of(Operation::bwd, family, Inputs::native, p.dtype)) {
      if (is_fused(kernel) && !prefers_fused(problem)) continue;
      if (supports_backward(kernel, problem, device) != Reject::none) continue;
      if (found == nullptr || is_fused(kernel)) found = &kernel;
    }
    if (found != nullptr) return {};
  }
  return unsupported("no kernel computes gradients of %s with head_dim %lld and v_dim %lld",
                     to_string(p.dtype), ll{p.head_dim}, ll{p.v_dim});
}

/// A Hopper kernel reads dout by TMA and writes rows of its gradients in pieces of 8 bytes.
Reject check_tma_gradients(const KernelInfo& kernel, const BackwardProblem& problem) noexcept {
  const Problem& p = problem.forward;
  const std::int64_t rows = p.q_varlen ? p.total_q : p.q_len;
  if (!has_tensor_map(problem.dout, rows, p.q_heads, p.q_varlen ? 1 : p.batch)) {
    return Reject::dout_strides;
  }
  const auto writes = [&](const Layout& layout, std::int64_t columns) {
    const bool typed = layout.dtype == p.dtype || layout.dtype == DType::f32;
    return !layout.given() ||
           (typed && layout.column == 1 && layout.alignment_bytes >= 8 && columns % 4 == 0);
  };
  const bool all = writes(problem.dq, p.head_dim) && writes(problem.dk, p.head_dim) &&
                   writes(problem.dv, p.v_dim);
  if (!all) return Reject::gradient_format;
  // It inspects K and V in tiles of dk and dv, Q and dout in tiles of dq.
  const bool both = problem.dq.given() && (problem.dk.given() || problem.dv.given());
  if (!both) return Reject::gradient_subset;
  const bool three = problem.dk.given() && problem.dv.given();
  return is_fused(kernel) && !three ? Reject::some_gradients : Reject::none;
}

/// The reason why the planner prefers another kernel, which supports the problem too.
Reject backward_preference(const KernelInfo& kernel, const KernelInfo& chosen) noexcept {
  if (kernel.device == DeviceType::cpu) return Reject::slower_isa;
  if (kernel.family == chosen.family && is_fused(kernel) != is_fused(chosen)) {
    return Reject::slower_tile;
  }
  return kernel.family == chosen.family ? Reject::wrong_size : Reject::slower_family;
}

/// Keys of a tile of dbias.
std::int32_t dbias_keys(const KernelInfo& kernel) noexcept {
  if (kernel.device == DeviceType::cpu) return 0;
  if (traits_of(kernel).loads != Loads::cp_async) return core::kDbiasKeys;
  return core::Sm80BackwardTraits{kernel.head_dim, kernel.threads}.key_step();
}

/// Tiles of partial dq: see core::partial_tiles().
std::int64_t query_tiles(const BackwardPlan& plan) noexcept {
  const Problem& p = plan.problem.forward;
  return p.q_heads * (p.q_varlen ? p.total_q / plan.tile_q + p.batch + 1
                                 : p.batch * ceil_div(p.q_len, plan.tile_q));
}

/// Chooses the chunks. They do not depend on the number of threads. A batch-invariant call has one.
void plan_chunks(BackwardPlan& plan) noexcept {
  if (is_fused(*plan.kernel)) plan.key_chunks = 1;
  if (plan.kernel->device == DeviceType::cuda) return;
  constexpr std::int64_t kWantedTasks = 32, kMostChunks = 8;
  const Problem& p = plan.problem.forward;
  const std::int64_t tiles = ceil_div(p.kv_len, plan.tile_k);
  const std::int64_t tasks = std::max<std::int64_t>(p.batch * p.kv_heads, 1);
  const bool invariant = p.options.reproducibility == Reproducibility::batch_invariant;
  const std::int64_t wanted =
      invariant ? 1 : std::clamp<std::int64_t>(ceil_div(kWantedTasks, tasks), 1, kMostChunks);
  const std::int64_t each = std::max<std::int64_t>(ceil_div(tiles, wanted), 1);
  plan.tiles_per_chunk = static_cast<std::int32_t>(each);
  plan.key_chunks = static_cast<std::int32_t>(ceil_div(tiles, each));
}

/// Lays out the workspace: header, row statistics, partial dq, scratch of the threads.
Status plan_backward_workspace(BackwardPlan& plan) noexcept {
  const Problem& p = plan.problem.forward;
  const std::size_t element = p.dtype == DType::f64 ? 8 : 4;
  const double rows = static_cast<double>(p.batch) * static_cast<double>(p.q_heads) *
                      static_cast<double>(std::max(p.q_len, p.total_q) + plan.tile_q);
  if (rows * static_cast<double>(p.head_dim) * std::max(plan.key_chunks, 1) >
      kMaxBackwardElements) {
    return unsupported("batch %lld, q_heads %lld and q_len %lld together have too many rows",
                       ll{p.batch}, ll{p.q_heads}, ll{p.q_len});
  }
  constexpr std::size_t kStats = 3;  // base, factor, delta
  plan.row_stats_offset = kWorkspaceHeaderBytes;
  plan.dq_partials_offset =
      plan.row_stats_offset +
      kStats * aligned_bytes(static_cast<std::size_t>(query_rows(p)) * element);
  const std::int64_t columns = is_fused(*plan.kernel) ? plan.kernel->head_dim : p.head_dim;
  const std::int64_t partial_rows =
      plan.problem.dq.given() ? plan.key_chunks * query_tiles(plan) * plan.tile_q : 0;
  plan.scratch_offset = plan.dq_partials_offset +
                        aligned_bytes(static_cast<std::size_t>(partial_rows * columns) * element);
  if (plan.kernel->device == DeviceType::cuda) {
    plan.workspace_bytes = plan.scratch_offset;
    if (is_fused(*plan.kernel)) {
      plan.dq_turns_offset = plan.workspace_bytes;
      plan.workspace_bytes += aligned_bytes(static_cast<std::size_t>(query_tiles(plan)) * 4);
    }
    const auto heads = static_cast<std::size_t>(p.batch * p.kv_heads);
    if (plan.kernel->probability_dtype == DType::f16) {  // core::ds_unit()
      constexpr std::size_t kNorms = 3;
      plan.dout_largest_offset = plan.workspace_bytes;
      plan.workspace_bytes += aligned_bytes(kNorms * heads * 4);
    }
    if (plan.kernel->family == Family::sm90) {
      plan.nonfinite_heads_offset = plan.workspace_bytes;
      plan.workspace_bytes += aligned_bytes((heads + 1) * 4);  // the counter of work tiles follows
    }
    return {};
  }
  const auto scratch = core::backward_scratch(plan.tile_q, plan.tile_k, p.head_dim, p.v_dim).total;
  plan.scratch_bytes_per_thread = aligned_bytes(static_cast<std::size_t>(scratch) * element);
  plan.workspace_bytes =
      plan.scratch_offset +
      plan.scratch_bytes_per_thread * static_cast<std::size_t>(std::max(1, plan.device.threads));
  return {};
}

Status plan_backward(const BackwardProblem& problem, const DeviceInfo& device,
                     BackwardPlan& plan) noexcept {
  if (problem.forward.device.type != device.device.type) {
    return invalid_argument("the tensors are on %s, the device is a %s device",
                            to_string(problem.forward.device.type), to_string(device.device.type));
  }
  FLASHCORE_RETURN_IF_ERROR(find_backward_kernel(problem, device, plan.kernel));
  plan.problem = problem;
  plan.device = device;
  // The plan must not refer to the caller's string.
  if (problem.forward.options.kernel != nullptr) {
    plan.problem.forward.options.kernel = plan.kernel->id;
  }
  const bool cuda = plan.kernel->device == DeviceType::cuda;
  plan.tile_q = cuda ? plan.kernel->tile_q : core::kBackwardTileQ;
  plan.tile_k = cuda ? plan.kernel->tile_k
                     : cpu_backward_tile_k(problem.forward.head_dim, problem.forward.v_dim);
  plan.dbias_keys = dbias_keys(*plan.kernel);
  plan_chunks(plan);
  plan.exact_stats = true;
  return plan_backward_workspace(plan);
}

double gradient_bytes(const Layout& layout, double elements) noexcept {
  return layout.given() ? elements * static_cast<double>(size_of(layout.dtype)) : 0.0;
}

std::string wanted_gradients(const BackwardProblem& p) {
  std::string text;
  const auto add = [&](const Layout& layout, const char* name) {
    if (layout.given()) text += (text.empty() ? "" : ", ") + std::string(name);
  };
  add(p.dq, "dq"), add(p.dk, "dk"), add(p.dv, "dv"), add(p.dbias, "dbias");
  add(p.dsinks, "dsinks");
  return text.empty() ? "none" : text;
}

}  // namespace

std::span<const CpuTuningRow> cpu_backward_tuning() noexcept {
  // K, V, their gradients, P and dS of a block of tiles stay in the L2 cache. Multiples of the 12
  // and 6 scalars of x86's register blocks.
  static constexpr CpuTuningRow kRows[] = {{128, 96}, {256, 48}, {576, 24}};
  return kRows;
}

std::int32_t cpu_backward_tile_k(std::int64_t head_dim, std::int64_t v_dim) noexcept {
  for (const CpuTuningRow& row : cpu_backward_tuning()) {
    if (std::max(head_dim, v_dim) <= row.max_dim) return row.tile_k;
  }
  return cpu_backward_tuning().back().tile_k;
}

Reject supports_backward(const KernelInfo& kernel, const Problem& problem,
                         const DeviceInfo& device) noexcept {
  if (kernel.op != Operation::bwd) return Reject::operation;
  const Reject forward = supports(kernel, problem, device);
  if (forward != Reject::operation) return forward;  // the device, the type or the dims
  if (uses_tensor_cores(traits_of(kernel)) && problem.options.softcap > core::kLargestShortCap) {
    return Reject::softcap;
  }
  const Features missing =
      features_of(problem) & ~kernel.features & ~Features::num_splits;  // splits do not apply
  return any(missing) ? Reject::missing_feature : Reject::none;
}

Reject supports_backward(const KernelInfo& kernel, const BackwardProblem& problem,
                         const DeviceInfo& device) noexcept {
  const Reject forward = supports_backward(kernel, problem.forward, device);
  if (forward != Reject::none) return forward;
  const bool own_dout = problem.dout.dtype == problem.forward.dtype || !problem.dout.given();
  if (!own_dout && !takes_f32_dout(kernel)) return Reject::dout_format;
  return takes_aligned_gradients(kernel) ? check_tma_gradients(kernel, problem) : Reject::none;
}

Result<BackwardPlan> make_backward_plan(const BackwardProblem& problem,
                                        const DeviceInfo& device) noexcept {
  Result<BackwardPlan> plan(std::in_place);
  Status status = plan_backward(problem, device, *plan);
  if (!status.ok()) plan = std::move(status);
  return plan;
}

Cost cost(const BackwardProblem& problem) noexcept {
  const Problem& p = problem.forward;
  Cost result = cost(p);
  const auto dim = [](std::int64_t n) { return static_cast<double>(n); };
  result.flops = 2.0 * (3 * dim(p.head_dim) + 2 * dim(p.v_dim)) * result.visible_pairs;
  const double q_rows = dim(query_rows(p));
  const double k_rows = dim(p.kv_heads * (p.kv_varlen ? p.total_k : p.batch * p.kv_len));
  result.bytes +=
      gradient_bytes(problem.dout, q_rows * dim(p.v_dim)) + gradient_bytes(problem.dlse, q_rows) +
      gradient_bytes(problem.dq, q_rows * dim(p.head_dim)) +
      gradient_bytes(problem.dk, k_rows * dim(p.head_dim)) +
      gradient_bytes(problem.dv, k_rows * dim(p.v_dim)) +
      gradient_bytes(problem.dbias, dim(problem.dbias_batch) * dim(problem.dbias_heads) *
                                        dim(problem.dbias_rows) * dim(p.kv_len)) +
      gradient_bytes(problem.dsinks, dim(p.q_heads));
  return result;
}

std::string explain(const BackwardPlan& plan) {
  if (plan.kernel == nullptr) return "an empty plan; use make_backward_plan()\n";
  const Problem& p = plan.problem.forward;
  std::string text;
  char line[512];
  const auto add = [&](const char* format, auto... values) {
    std::snprintf(line, sizeof line, format, values...);
    text += line;
  };
  text += "problem    " + problem_line(p) + "\n";
  text += "gradients  " + wanted_gradients(plan.problem) +
          (plan.problem.dlse.given() ? "; with a gradient of lse\n" : "\n");
  if (!plan.exact_stats) {
    text += "lse        taken as it is: it covers more keys than the call has\n";
  }
  const bool cuda = plan.kernel->device == DeviceType::cuda;
  text += "device     " + device_line(plan.device) + "\n";
  add("kernel     %s: %s%s\n", plan.kernel->id,
      p.options.kernel != nullptr ? "requested by the caller"
      : cuda                      ? "the smallest dims that fit"
                                  : "the widest instruction set of this CPU with kernels",
      plan.kernel->compiled ? "" : "; not part of this build");
  if (cuda) {
    add("tiles      dq: %d rows; dk and dv: %d keys\n", plan.tile_q, plan.tile_k);
    const std::size_t dq_sums = plan.scratch_offset - plan.dq_partials_offset;
    add("workspace  %zu bytes (header %zu, row statistics %zu", plan.workspace_bytes,
        kWorkspaceHeaderBytes, plan.workspace_bytes - kWorkspaceHeaderBytes - dq_sums);
    if (is_fused(*plan.kernel)) add(", sums of dq %zu", dq_sums);
    text += ")\n";
  } else {
    add("tiles      %d rows x %d keys, %d chunks of %d KV tiles\n", plan.tile_q, plan.tile_k,
        plan.key_chunks, plan.tiles_per_chunk);
    add("workspace  %zu bytes (header %zu, row statistics %zu, partial dq %zu, scratch %d x %zu)\n",
        plan.workspace_bytes, kWorkspaceHeaderBytes,
        plan.dq_partials_offset - plan.row_stats_offset,
        plan.scratch_offset - plan.dq_partials_offset, plan.device.threads,
        plan.scratch_bytes_per_thread);
  }
  const Cost c = cost(plan.problem);
  add("work       %.4g GFLOP on %.4g visible pairs, %.4g MB of tensors\n", c.flops / 1e9,
      c.visible_pairs, c.bytes / 1e6);
  text += "not used\n";
  for (const KernelInfo& kernel : kernels()) {
    if (&kernel == plan.kernel || kernel.op != Operation::bwd || kernel.dtype != p.dtype ||
        kernel.device != plan.kernel->device) {
      continue;
    }
    Reject reject = supports_backward(kernel, plan.problem, plan.device);
    if (reject == Reject::none) reject = backward_preference(kernel, *plan.kernel);
    add("  %-24s %s\n", kernel.id, to_message(reject, kernel, p, plan.device).c_str());
  }
  return text;
}

}  // namespace flashcore
