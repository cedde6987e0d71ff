// Layout of the workspace: header, scratch of CPU threads, partial results of splits, packed mask.
#include <algorithm>

#include "core/error.h"
#include "core/key_ranges.h"
#include "core/packed_mask.h"
#include "core/params.h"
#include "core/scratch.h"
#include "plan/divide.h"
#include "plan/model/model.h"
#include "plan/planner.h"

namespace flashcore {
namespace {

constexpr std::size_t kWorkspaceAlignment = 256;

// Larger element counts are rejected, so that byte counts cannot overflow.
constexpr double kMaxElements = 0x1p58;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

}  // namespace

std::size_t packed_mask_bytes(const Problem& p) noexcept {
  if (!p.mask.given() && !p.mask_blocks.given()) return 0;
  const Layout& layout = p.mask.given() ? p.mask : p.mask_blocks;
  const core::PackedMask mask =
      core::packed_mask_of(layout.batch, layout.head, p.mask.given() ? layout.row : core::kEveryRow,
                           static_cast<std::int32_t>(p.batch), static_cast<std::int32_t>(p.q_heads),
                           static_cast<std::int32_t>(p.q_len), static_cast<std::int32_t>(p.kv_len));
  return aligned(static_cast<std::size_t>(mask.word_count()) * sizeof(std::uint32_t)) +
         aligned(static_cast<std::size_t>(mask.range_count()) * sizeof(core::KeyRange));
}

Status plan_workspace(Plan& plan) noexcept {
  const Problem& p = plan.problem;
  const std::size_t element = p.dtype == DType::f64 ? 8 : 4;
  std::size_t end = kWorkspaceHeaderBytes;
  if (plan.kernel->device == DeviceType::cpu) {
    const auto scratch = core::scratch_layout(cpu_operands(plan.kernel->isa, p.dtype), plan.tile_q,
                                              plan.tile_k, p.head_dim, p.v_dim)
                             .total;
    plan.scratch_offset = end;
    plan.scratch_bytes_per_thread = aligned(static_cast<std::size_t>(scratch) * element);
    end +=
        plan.scratch_bytes_per_thread * static_cast<std::size_t>(std::max(1, plan.device.threads));
  }
  if (plan.splits > 1) {
    const std::int64_t rows = p.q_varlen ? p.total_q * p.q_heads : p.batch * p.q_heads * p.q_len;
    if (static_cast<double>(rows) * plan.splits * static_cast<double>(p.v_dim) > kMaxElements) {
      return unsupported(
          "num_splits: the workspace of %d splits does not fit the address space; use fewer",
          plan.splits);
    }
    const auto partials = static_cast<std::size_t>(rows * plan.splits);
    plan.partial_out_offset = end;
    end += aligned(partials * static_cast<std::size_t>(p.v_dim) * element);
    plan.partial_lse_offset = end;
    end += aligned(partials * element);
  }
  if (plan.tail_tiles > 0) {
    const auto partials = static_cast<std::size_t>(plan.tail_tiles * plan.tail_splits);
    plan.partial_out_offset = end;
    end += aligned(partials * static_cast<std::size_t>(sm90_shape(*plan.kernel).partial_bytes()));
  }
  if (plan.key_ranges > 1) {
    const std::int64_t partials =
        plan.ranges_apart ? plan.num_tiles * plan.key_ranges
                          : std::min<std::int64_t>(plan.num_tiles, plan.device.sm_count);
    plan.partial_out_offset = end;
    end += aligned(static_cast<std::size_t>(partials) *
                   static_cast<std::size_t>(sm90_shape(*plan.kernel).partial_bytes()));
  }
  if (packs_mask(*plan.kernel)) {
    if (const std::size_t bytes = packed_mask_bytes(p); bytes > 0) {
      plan.packed_mask_offset = end;
      end += bytes;
    }
  }
  plan.workspace_bytes = end;
  return {};
}

Status apply_tail_split(Plan& plan, std::int64_t tiles, std::int64_t splits) noexcept {
  const Splits keys = split_keys(plan.problem.kv_len, splits, plan.tile_k);
  const std::int64_t counters = tiles * plan.tile_q / core::kWarpRows;
  const bool possible = tiles > 0 && keys.count > 1 && counters < core::kMaxCounters;
  plan.tail_tiles = possible ? tiles : 0;
  plan.tail_splits = possible ? keys.count : 1;
  plan.keys_per_tail_split = possible ? keys.keys_each : 0;
  return plan_workspace(plan);
}

Status apply_key_ranges(Plan& plan) noexcept {
  constexpr std::int64_t kMostPartialsPerSm = 8;
  plan.keys_per_range = std::int64_t{core::kRangeTiles} * plan.tile_k;
  const std::int64_t ranges =
      std::max<std::int64_t>(ceil_div(plan.problem.kv_len, plan.keys_per_range), 1);
  plan.key_ranges = static_cast<std::int32_t>(ranges);
  const std::int64_t counters = plan.num_tiles * plan.tile_q / core::kWarpRows;
  plan.ranges_apart = ranges > 1 && counters < core::kMaxCounters &&
                      plan.num_tiles <= kMostPartialsPerSm * plan.device.sm_count / ranges;
  return plan_workspace(plan);
}

// Counters: make_params() gives them to every kernel that combines its own splits, even if a
// cluster does it in the end. A persistent kernel counts the tail splits of a tile, and fetches
// tiles by a counter if there are more tiles than CTAs.
bool uses_header(const Plan& plan) noexcept {
  const bool counts_splits =
      plan.combine == CombineMode::last_cta || plan.combine == CombineMode::cluster;
  if (plan.problem.options.checked || counts_splits || plan.tail_tiles > 0 || plan.ranges_apart) {
    return true;
  }
  return plan.kernel != nullptr && is_persistent(*plan.kernel) &&
         plan.num_tiles > plan.device.sm_count;
}

}  // namespace flashcore
