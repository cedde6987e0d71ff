// Memory overlap of strided tensors.
#pragma once

#include "flashcore/types.h"

namespace flashcore {

/// True if two elements of the tensor may have the same address. Exact for nested strides:
/// permutations, slices and paddings of compact layouts. Other layouts count as overlapping.
bool overlaps_itself(const TensorView& tensor) noexcept;

/// True if the tensors share a byte. Exact, even for interleaved tensors of one buffer. True if the
/// bounded search ends without a result.
bool share_memory(const TensorView& a, const TensorView& b) noexcept;

}  // namespace flashcore
