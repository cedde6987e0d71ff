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

/// Whether a GPU kernel's blocks of tile_q rows keep the device busy, or fewer rows per block would
/// do better: `rows` per head, `items` blocks in all.
bool keeps_busy(const KernelInfo& kernel, std::int64_t rows, std::int64_t items,
                const DeviceInfo& device) noexcept;

/// Keys that are worth a block of their own.
std::int64_t min_keys_per_split(const KernelInfo& kernel) noexcept;

struct Splits {
  std::int32_t count = 1;
  std::int64_t keys_each = 0;  // a multiple of tile_k
};

/// How many key ranges, for `items` work items before splitting. `wanted_items` would fill the
/// device; a range is never shorter than min_keys. options.num_splits overrides.
Splits choose_splits(const Problem& problem, std::int64_t items, std::int64_t wanted_items,
                     std::int64_t min_keys, std::int32_t tile_k) noexcept;

}  // namespace flashcore
