// Memory overlap of strided tensors.
#pragma once

#include "flashcore/types.h"

namespace flashcore {

/// True if two elements of the tensor may have the same address. Exact for nested strides, that is,
/// for permutations, slices and paddings of compact layouts. Other layouts count as overlapping.
bool overlaps_itself(const TensorView& tensor) noexcept;

/// True if the tensors share a byte. Exact, also for interleaved tensors of one buffer, unless the
/// bounded search gives up: then true.
bool share_memory(const TensorView& a, const TensorView& b) noexcept;

}  // namespace flashcore
