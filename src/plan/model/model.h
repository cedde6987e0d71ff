// Tuning as data: pure functions from a problem's dims and a device to tile sizes and splits.
#pragma once

#include <cstdint>
#include <span>

#include "flashcore/plan.h"

namespace flashcore {

/// Keys per step of the CPU kernel for dims up to max_dim.
struct CpuTuningRow {
  std::int32_t max_dim;
  std::int32_t tile_k;
};
std::span<const CpuTuningRow> cpu_tuning(Isa isa) noexcept;
std::int32_t cpu_tile_k(Isa isa, std::int64_t head_dim, std::int64_t v_dim) noexcept;

/// Whether a simt kernel's blocks of tile_q rows keep the device busy, or fewer rows per block
/// would do better: `rows` per head, `items` blocks in all.
bool fills_device(const KernelInfo& kernel, std::int64_t rows, std::int64_t items,
                  const DeviceInfo& device) noexcept;

struct Splits {
  std::int32_t count = 1;
  std::int64_t keys_each = 0;  // a multiple of tile_k
};

/// `count` key ranges of whole tiles, fewer where the keys are.
Splits split_keys(std::int64_t kv_len, std::int64_t count, std::int32_t tile_k) noexcept;

/// How many key ranges, for `items` work items before splitting. `wanted_items` would fill the
/// device; a range is never shorter than min_keys. options.num_splits overrides.
Splits choose_splits(const Problem& problem, std::int64_t items, std::int64_t wanted_items,
                     std::int64_t min_keys, std::int32_t tile_k) noexcept;

/// What a tensor-core kernel makes of a problem.
struct Sm80Schedule {
  Splits splits;
  bool in_cluster = false;  // the splits of an item are joined among neighbouring SMs
  double cycles = 0;        // an estimate, to compare kernels with
};
Sm80Schedule schedule_sm80(const KernelInfo& kernel, const Problem& problem,
                           const DeviceInfo& device) noexcept;

/// An estimate of a Hopper kernel's SM cycles. masked: as if the problem were causal, to choose
/// among them; else as if nothing were masked, to be compared with schedule_sm80()'s.
double cycles_sm90(const KernelInfo& kernel, const Problem& problem, const DeviceInfo& device,
                   bool masked) noexcept;

/// The items that are cut into parts because they would be a round of their own that leaves SMs
/// idle: the last ones, all of one length. None where that cannot be done or does not pay.
struct Tail {
  std::int64_t items = 0;
  std::int64_t parts = 1;
  double cycles = 0;  // of these items, expected
};
Tail plan_tail_split(const KernelInfo& kernel, const Problem& problem,
                     const DeviceInfo& device) noexcept;

/// Query heads, sharing K and V, whose rows a kernel puts into one tile.
std::int64_t heads_in_tile(const KernelInfo& kernel, const Problem& problem) noexcept;
/// Rows a kernel's tiles are cut from: those of that many heads.
std::int64_t packed_rows(const KernelInfo& kernel, const Problem& problem) noexcept;
/// Work items of a kernel before the keys are split.
std::int64_t tile_count(const KernelInfo& kernel, const Problem& problem) noexcept;

}  // namespace flashcore
