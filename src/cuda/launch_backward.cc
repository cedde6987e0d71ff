#include "cuda/launch_backward.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "core/backward_tiles.h"
#include "core/ds_unit.h"
#include "cuda/check.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/registry.h"
#include "cuda/sm90/make_params.h"

namespace flashcore::cuda {
namespace {

/// Launches a kernel whose CTAs loop over `count` units. No unit, no launch.
Status launch_on(const void* entry, const core::BackwardParams& params, std::int64_t count,
                 int units_per_cta, int threads, Stream stream) noexcept {
  constexpr std::int64_t kMostCtas = 1 << 16;
  const std::int64_t ctas = (count + units_per_cta - 1) / units_per_cta;
  if (ctas <= 0) return {};
  return launch_kernel(entry, params, {std::min(ctas, kMostCtas), threads}, stream);
}

Status launch_before(const core::BackwardParams& params, Stream stream) noexcept {
  const core::AttentionParams& f = params.fwd;
  core::BackwardParams stats = params;
  // Long CTAs if there are many: what they begin with takes as long as a few rows.
  const std::int64_t all_rows = std::int64_t{f.batch} * f.q_heads * f.q_len;
  stats.stats_rows = kRowStatsRows * (all_rows > (1 << 16) ? 4 : 1);
  // CTAs of row_stats and v_norms for heads of `length` rows.
  const auto row_blocks = [&](std::int32_t heads, std::int32_t length) {
    return std::int64_t{f.batch} * heads * core::tiles_of(length, stats.stats_rows);
  };
  if (f.cu_seqlens_q != nullptr || f.cu_seqlens_k != nullptr) {
    const std::int64_t columns = std::max(f.head_dim, f.v_dim);
    const std::int64_t rows =
        std::max(std::int64_t{f.q_heads} * f.total_q, std::int64_t{f.kv_heads} * f.total_k);
    FLASHCORE_RETURN_IF_ERROR(launch_on(zero_rows_entry(), params, rows * columns, kZeroRowsThreads,
                                        kZeroRowsThreads, stream));
  }
  const auto heads = static_cast<std::size_t>(std::int64_t{f.batch} * f.kv_heads);
  const auto zero = [&](std::uint32_t* data, std::size_t count) -> Status {
    if (data == nullptr) return {};
    FLASHCORE_CUDA(
        cudaMemsetAsync(data, 0, sizeof *data * count, static_cast<cudaStream_t>(stream)));
    return {};
  };
  FLASHCORE_RETURN_IF_ERROR(zero(params.dout_largest, core::kDsNorms * heads));
  FLASHCORE_RETURN_IF_ERROR(zero(params.nonfinite_heads, heads + 1));  // and the tile counter
  if (params.dout_largest != nullptr) {
    FLASHCORE_RETURN_IF_ERROR(launch_on(v_norms_entry(), stats, row_blocks(f.kv_heads, f.kv_len), 1,
                                        kRowStatsThreads, stream));
  }
  return launch_on(row_stats_entry(), stats, row_blocks(f.q_heads, f.q_len), 1, kRowStatsThreads,
                   stream);
}

/// Computes heads with inputs that are not finite again.
Status launch_repair(const BackwardPlan& plan, const core::BackwardParams& params,
                     Stream stream) noexcept {
  core::BackwardParams repair = params;
  repair.fwd.q_tiles = static_cast<std::int32_t>(core::tiles_of(params.fwd.q_len, kRepairRows));
  repair.fwd.tile_q = kRepairRows;
  repair.k_tiles = static_cast<std::int32_t>(core::tiles_of(params.fwd.kv_len, kRepairRows));
  return launch_kernel(repair_entry(), repair,
                       {2 * plan.device.sm_count, kRepairThreads, kRepairBytes}, stream);
}

/// A Hopper kernel: its parameters have tensor maps and the counter of its work tiles.
Status launch_sm90(const BackwardPlan& plan, const core::BackwardParams& params, const void* entry,
                   Stream stream) noexcept {
  const KernelInfo& kernel = *plan.kernel;
  sm90::BwdParams hopper;
  FLASHCORE_RETURN_IF_ERROR(make_sm90_bwd_params(plan, params, hopper));
  if (hopper.num_scheduled == 0) return {};
  const std::int32_t ctas = std::min(hopper.num_scheduled, plan.device.sm_count);
  FLASHCORE_RETURN_IF_ERROR(
      launch_kernel(entry, hopper, {ctas, kernel.threads, kernel.smem_bytes}, stream));
  return launch_repair(plan, params, stream);
}

/// A fused kernel, and the one that writes dq.
Status launch_fused(const BackwardPlan& plan, const core::BackwardParams& params, const void* entry,
                    Stream stream) noexcept {
  const KernelInfo& kernel = *plan.kernel;
  const core::AttentionParams& f = params.fwd;
  sm90::FusedParams hopper;
  FLASHCORE_RETURN_IF_ERROR(make_sm90_fused_params(plan, params, hopper));
  if (hopper.num_scheduled > 0) {
    const std::int64_t turns = core::partial_tiles(f.batch, f.q_heads, f.q_tiles, f.total_q,
                                                   f.tile_q, f.cu_seqlens_q != nullptr);
    FLASHCORE_CUDA(cudaMemsetAsync(hopper.turns, 0,
                                   sizeof *hopper.turns * static_cast<std::size_t>(turns),
                                   static_cast<cudaStream_t>(stream)));
    const std::int32_t ctas = std::min(hopper.num_scheduled, plan.device.sm_count);
    FLASHCORE_RETURN_IF_ERROR(
        launch_kernel(entry, hopper, {ctas, kernel.threads, kernel.smem_bytes}, stream));
  }
  const std::int64_t dq_tiles = std::int64_t{f.batch} * f.q_heads * f.q_tiles;
  if (dq_tiles > 0) {
    LaunchOptions options{dq_tiles, kFinishDqThreads};
    options.programmatic_launch = hopper.num_scheduled > 0;
    FLASHCORE_RETURN_IF_ERROR(
        launch_kernel(entry_of(kernel, KernelEntry::general), hopper, options, stream));
  }
  return launch_repair(plan, params, stream);
}

/// The kernel of dq, dk, dv and dbias.
Status launch_main(const BackwardPlan& plan, const core::BackwardParams& params, const void* entry,
                   Stream stream) noexcept {
  const KernelInfo& kernel = *plan.kernel;
  if (params.k_chunks > 0) return launch_fused(plan, params, entry, stream);
  if (kernel.family == Family::sm90) return launch_sm90(plan, params, entry, stream);
  const std::int64_t tiles = core::backward_grid(params).total();
  if (tiles == 0) return {};
  return launch_kernel(entry, params, {tiles, kernel.threads, kernel.smem_bytes}, stream);
}

}  // namespace

Status launch_backward(const BackwardPlan& plan, const core::BackwardParams& params,
                       Stream stream) {
  const KernelInfo& kernel = *plan.kernel;
  const bool plain =
      kernel.family == Family::sm90 ? takes_plain_sm90_path(params) : params.fast_path;
  const void* entry = entry_of(kernel, plain ? KernelEntry::plain : KernelEntry::general);
  if (entry == nullptr) {
    return unsupported("kernel %s is not part of this build (FLASHCORE_KERNELS excludes it)",
                       kernel.id);
  }
  const int device = plan.problem.forward.device.index;
  const DeviceScope scope(device);
  FLASHCORE_RETURN_IF_ERROR(scope.status());
  FLASHCORE_RETURN_IF_ERROR(allow_shared_memory(kernel, entry, device));
  FLASHCORE_RETURN_IF_ERROR(launch_before(params, stream));
  FLASHCORE_RETURN_IF_ERROR(launch_main(plan, params, entry, stream));
  if (params.dsinks == nullptr) return {};
  return launch_on(dsinks_entry(), params, params.fwd.q_heads, 1, kDsinksThreads, stream);
}

}  // namespace flashcore::cuda
