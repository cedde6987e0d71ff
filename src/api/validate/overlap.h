// Do strided tensors share memory?
#pragma once

#include "flashcore/types.h"

namespace flashcore {

/// Whether two index tuples of one tensor may lie at one address. Exact for nested strides (every
/// layout a permutation, slice or padding of a compact one has); other layouts count as
/// overlapping.
bool overlaps_itself(const TensorView& tensor) noexcept;

/// Whether the tensors share a byte. Exact: interleaved tensors of one buffer are told apart,
/// within a bounded search that answers "yes" when it gives up.
bool share_memory(const TensorView& a, const TensorView& b) noexcept;

}  // namespace flashcore
