// Cycle models: pure functions of a kernel, a problem and a device that estimate time and choose
// tile sizes and splits. One FamilyModel per family.
#pragma once

#include <cstdint>
#include <span>

#include "core/scratch.h"
#include "flashcore/plan.h"

namespace flashcore {

/// Keys per step of the CPU kernel for dims up to max_dim.
struct CpuTuningRow {
  std::int32_t max_dim;
  std::int32_t tile_k;
};
std::span<const CpuTuningRow> cpu_tuning(Isa isa) noexcept;
/// Rows per work tile. They change no bit of the result.
std::int32_t cpu_tile_q(const KernelInfo& kernel, const Problem& problem,
                        const DeviceInfo& device) noexcept;
/// The operand format of the instruction set's kernels, which sizes their scratch memory.
core::CpuOperands cpu_operands(Isa isa, DType dtype) noexcept;
std::int32_t cpu_tile_k(Isa isa, std::int64_t head_dim, std::int64_t v_dim) noexcept;
/// The same for the CPU kernels of gradients, on every instruction set.
std::span<const CpuTuningRow> cpu_backward_tuning() noexcept;
std::int32_t cpu_backward_tile_k(std::int64_t head_dim, std::int64_t v_dim) noexcept;

struct Splits {
  std::int32_t count = 1;
  std::int64_t keys_each = 0;  // a multiple of tile_k
};

/// Divides the keys into `count` splits of whole tiles, or fewer if there are fewer tiles.
Splits split_keys(std::int64_t kv_len, std::int64_t count, std::int32_t tile_k) noexcept;

/// Chooses a number of splits for `tiles` work tiles. `wanted_tiles` fill the device; a split has
/// at least min_keys keys. options.num_splits overrides.
Splits choose_splits(const Problem& problem, std::int64_t tiles, std::int64_t wanted_tiles,
                     std::int64_t min_keys, std::int32_t tile_k) noexcept;

struct SplitPlan {
  Splits splits;
  bool cluster = false;  // a cluster combines the splits of a tile
};

/// Tail split: the tiles of the last partial wave, which would leave SMs idle, are split along the
/// keys. All tiles have one length. tiles is 0 if that is impossible or not faster.
struct TailPlan {
  std::int64_t tiles = 0;
  std::int64_t splits = 1;
  double cycles = 0;  // estimate for these tiles
};

/// The kernels that an estimate is compared with.
enum class Rivals { own_family, other_families };

/// The unit of a model's estimates.
enum class EstimateUnit {
  rank,             // orders the kernels of the family; not comparable with other families
  cycles,           // SM cycles, independent of the rivals
  cycles_by_rivals  // SM cycles that depend on the rivals
};

struct Estimate {
  double cost = 0;  // the planner chooses the smallest
  /// The result of plan_splits, if the estimate needs it; otherwise its count is 0.
  SplitPlan splits{.splits = {.count = 0}};
};

struct FamilyModel {
  Estimate (*estimate)(const KernelInfo&, const Problem&, const DeviceInfo&, Rivals) noexcept;
  /// A positive lower bound of the cost, if the kernel is unlikely to be the best one; otherwise 0.
  double (*bound)(const KernelInfo&, const Problem&) noexcept;
  SplitPlan (*plan_splits)(const KernelInfo&, const Problem&, const DeviceInfo&) noexcept;
  TailPlan (*plan_tail)(const KernelInfo&, const Problem&, const DeviceInfo&) noexcept;
  EstimateUnit unit;
};

const FamilyModel& model_of(Family family) noexcept;  // plan/model/model.cc lists them

/// Time of an sm80 call with its options, relative to a plain call, which the model estimates.
/// For (4, 32/8, 4096, 128) and (16, 32/8, 1/8192, 128) on an H200.
double sm80_options_factor(const Problem& problem, Features needed) noexcept;

/// The bound of families whose estimates take little time.
double no_bound(const KernelInfo&, const Problem&) noexcept;
/// The plan_tail of families without tail splits.
TailPlan no_tail(const KernelInfo&, const Problem&, const DeviceInfo&) noexcept;

/// Keys per step, from the kernel or, on a CPU, from its tuning table.
std::int32_t key_tile(const KernelInfo& kernel, const Problem& problem) noexcept;

}  // namespace flashcore
