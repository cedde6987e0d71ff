// Which kernels of kernels.def are compiled in, and where they are.
#pragma once

#include "flashcore/plan.h"

namespace flashcore::cuda {

/// The kernel's entry for cudaLaunchKernel, or null where it is not compiled. `kernel` is an
/// element of kernels().
const void* entry_of(const KernelInfo& kernel) noexcept;

/// The kernel that joins partial results (combine.cu).
const void* combine_entry() noexcept;
inline constexpr int kCombineThreads = 128;
inline constexpr int kCombineRowsPerBlock = kCombineThreads / 32;

/// The kernel that appends to a cache (append.cu).
const void* append_entry() noexcept;
inline constexpr int kAppendThreads = 128;
inline constexpr int kAppendRowsPerBlock = kAppendThreads / 32;

}  // namespace flashcore::cuda
