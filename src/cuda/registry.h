// The entry points of the kernels that this build has.
#pragma once

#include "core/quantize.h"

namespace flashcore {
struct KernelInfo;  // flashcore/plan.h: its standard headers would cost each .cu file a second
}

namespace flashcore::cuda {

/// The entry point for cudaLaunchKernel; null if the kernel is not compiled. `kernel` is an element
/// of kernels().
const void* entry_of(const KernelInfo& kernel) noexcept;

/// Combines partial results (common/combine.cu).
const void* combine_entry() noexcept;
inline constexpr int kCombineThreads = 128;
inline constexpr int kCombineRowsPerBlock = kCombineThreads / 32;

/// Appends to a cache (common/append.cu).
const void* append_entry() noexcept;
inline constexpr int kAppendThreads = 128;
inline constexpr int kAppendRowsPerBlock = kAppendThreads / 32;

/// The kernels of common/quantize.cu, in launch order.
const void* clear_scales_entry() noexcept;  // sets counts, and scales that are computed, to 0
/// Sets a scale to the largest magnitude of its elements.
const void* find_largest_entry(const core::QuantParams& p) noexcept;
const void* finish_scales_entry() noexcept;  // divides it by the largest value of the format
const void* encode_entry(const core::QuantParams& p) noexcept;
const void* decode_entry(const core::QuantParams& p) noexcept;
inline constexpr int kQuantThreads = 256;

}  // namespace flashcore::cuda
