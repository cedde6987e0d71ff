// The planner's reasons, shared by make_plan() and explain().
#pragma once

#include "flashcore/plan.h"

namespace flashcore {

/// Why a kernel cannot, or should not, take a problem on a device.
enum class Reject {
  none,
  other_device,        // made for a CPU, or for a GPU
  not_compiled,        // not part of this build
  isa,                 // an instruction set this CPU lacks
  compute_capability,  // a newer GPU
  shared_memory,       // more shared memory than a block can have here
  dtype,
  head_dim,         // the problem's dims are larger
  wrong_size,       // made for larger dims: a smaller kernel wastes less
  grid_too_small,   // many rows per block would leave SMs idle
  grid_too_large,   // few rows per block would read K and V too often
  missing_feature,  // what only other kernels know: bias, mask, pages, splits
  strides,          // of q, k or v, that the copy engine cannot follow
  input_format,     // 8-bit q, k or v, or 16-bit ones
  scales,           // of smaller blocks of k or v than its steps
  too_many_rows,    // more rows or items than its 32-bit counters hold
  softcap,          // larger than it computes exactly
  slower_family,    // tensor cores take it
  slower_isa,       // a wider instruction set is there
};

/// The kernels of a family for a dtype: of small head dims first. Empty where there are none.
std::span<const KernelInfo> kernels_of(const char* family, DType dtype) noexcept;

/// Whether q, k and v may be 8-bit, and whether k and v must be. In which format is a run-time
/// switch inside a kernel, but where tensor cores read codes as they are: those are e4m3, all
/// three.
bool takes_8_bits(const KernelInfo& kernel) noexcept;
bool needs_8_bits(const KernelInfo& kernel) noexcept;
bool needs_e4m3(const KernelInfo& kernel) noexcept;
inline constexpr std::int64_t kKeysOfAScale = 8;  // at least, in such a kernel; of values a tile's

/// Whether a launch has at most one block an SM, each of which works through many items.
bool is_persistent(const KernelInfo& kernel) noexcept;

/// Whether the kernel can run the problem at all.
Reject supports(const KernelInfo& kernel, const Problem& problem,
                const DeviceInfo& device) noexcept;

/// Why `kernel`, which supports the problem, is not the planner's choice; none for the chosen one.
Reject preference(const KernelInfo& kernel, const Problem& problem,
                  const DeviceInfo& device) noexcept;

/// Whether a kernel can cut items of the problem into parts along the keys: items are then all of
/// one length, every part has keys, and which items are cut may depend on the batch.
bool can_split_tail(const KernelInfo& kernel, const Problem& problem) noexcept;

/// Lets a plan, whose kernel does so, cut its last items into parts; as many parts as asked for, or
/// as there are steps. The workspace grows.
Status apply_tail_split(Plan& plan, std::int64_t items, std::int64_t parts) noexcept;

/// In words, about this kernel.
std::string describe(Reject reject, const KernelInfo& kernel, const Problem& problem,
                     const DeviceInfo& device);

}  // namespace flashcore
