// Which kernels of kernels.def are compiled in, and where they are.
#pragma once

#include "core/quantize.h"

namespace flashcore {
struct KernelInfo;  // flashcore/plan.h, whose standard headers would cost every .cu file a second
}

namespace flashcore::cuda {

/// The kernel's entry for cudaLaunchKernel, or null where it is not compiled. `kernel` is an
/// element of kernels().
const void* entry_of(const KernelInfo& kernel) noexcept;

/// The kernel that joins partial results (common/combine.cu).
const void* combine_entry() noexcept;
inline constexpr int kCombineThreads = 128;
inline constexpr int kCombineRowsPerBlock = kCombineThreads / 32;

/// The kernel that appends to a cache (common/append.cu).
const void* append_entry() noexcept;
inline constexpr int kAppendThreads = 128;
inline constexpr int kAppendRowsPerBlock = kAppendThreads / 32;

/// The kernels of common/quantize.cu, in the order in which they run.
const void* clear_scales_entry() noexcept;  // scales (if they are to be found) and counts are 0
const void* find_largest_entry(
    const core::QuantParams& p) noexcept;    // scale: its elements' largest magnitude
const void* finish_scales_entry() noexcept;  // scale: what makes that the largest code
const void* encode_entry(const core::QuantParams& p) noexcept;
const void* decode_entry(const core::QuantParams& p) noexcept;
inline constexpr int kQuantThreads = 256;

}  // namespace flashcore::cuda
