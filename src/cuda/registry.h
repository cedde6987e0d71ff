// Entry points of the kernels in this build.
#pragma once

#include "core/combine.h"
#include "core/quantize.h"
#include "cuda/kernel_entry.h"

namespace flashcore {
struct KernelInfo;  // flashcore/plan.h: its standard headers would cost each .cu file a second
}

namespace flashcore::cuda {

/// The entry point for cudaLaunchKernel; null if the kernel is not compiled. `kernel` is an element
/// of kernels(). launch.cc chooses the entry of a call.
const void* entry_of(const KernelInfo& kernel, KernelEntry entry) noexcept;

/// Combines partial results (common/combine.cu): a kernel of kCombineThreads. For a long table it
/// takes core::LongCombineParams; fill_table() writes the table chunk by chunk.
struct CombineForm {
  const void* entry;
  std::int64_t ctas;
};
CombineForm combine_form(const core::CombineParams& p) noexcept;
inline constexpr int kCombineThreads = 128;

/// Packs a boolean mask into bits (common/pack_mask.cu).
const void* pack_mask_entry() noexcept;
inline constexpr int kPackMaskThreads = 512;
/// Packs a block mask in the same way.
const void* pack_block_mask_entry() noexcept;

struct CombineTableChunk {
  core::PartialResult entries[core::kMaxCombineTable];
  core::PartialResult* to;
  std::int32_t count;
};
const void* fill_table_entry() noexcept;

/// Appends to a cache (common/append.cu).
const void* append_entry() noexcept;
inline constexpr int kAppendThreads = 128;
inline constexpr int kAppendRowsPerCta = kAppendThreads / 32;

// The kernels of common/backward.cu.
/// Statistics of every query row, before the main kernel.
const void* row_stats_entry() noexcept;
inline constexpr int kRowStatsThreads = 256;
inline constexpr int kRowStatsRows = 32;  // of a short CTA
/// Norms of the rows of v, for core::ds_unit().
const void* v_norms_entry() noexcept;
/// Zeroes varlen gradients, because rows between the sequences belong to no work tile.
const void* zero_rows_entry() noexcept;
inline constexpr int kZeroRowsThreads = 256;
inline constexpr int kFinishDqThreads = 128;
/// dsinks, after the row statistics. One CTA per query head.
const void* dsinks_entry() noexcept;
inline constexpr int kDsinksThreads = 256;

/// Computes the gradients of nonfinite_heads again (simt/repair.cu).
const void* repair_entry() noexcept;
inline constexpr int kRepairThreads = 256;
inline constexpr int kRepairRows = 32;  // of a work tile
inline constexpr int kRepairBytes = 27504;

// The kernels of common/quantize.cu, in launch order.
/// Zeroes the saturation counts, and the scales unless the caller gives them.
const void* clear_scales_entry() noexcept;
/// Sets each scale to the largest magnitude of its elements.
const void* find_largest_entry(const core::QuantParams& p) noexcept;
/// Divides each scale by the largest value of the format.
const void* finish_scales_entry() noexcept;
const void* encode_entry(const core::QuantParams& p) noexcept;
const void* decode_entry(const core::QuantParams& p) noexcept;
inline constexpr int kQuantThreads = 256;

}  // namespace flashcore::cuda
