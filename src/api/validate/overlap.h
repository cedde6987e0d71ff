// Memory overlap of strided tensors.
#pragma once

#include "flashcore/types.h"

namespace flashcore {

/// The bytes from a tensor's lowest to its highest element, as offsets from its pointer.
struct ByteRange {
  std::intptr_t data = 0;
  std::int64_t begin = 0, end = 0;  ///< equal if the tensor has no elements or no pointer
};
inline ByteRange byte_range(const TensorView& tensor) noexcept {
  std::int64_t low = 0, high = 0;  // elements
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] == 0) return {};
    const std::int64_t reach = (tensor.shape[i] - 1) * tensor.strides[i];
    low += reach < 0 ? reach : 0;
    high += reach > 0 ? reach : 0;
  }
  if (tensor.data == nullptr) return {};
  const std::int64_t size = size_of(tensor.dtype);
  return {reinterpret_cast<std::intptr_t>(tensor.data), low * size, (high + 1) * size};
}

/// True if the ranges have no byte in common. Two tensors are usually that far apart.
inline bool are_disjoint(const ByteRange& a, const ByteRange& b) noexcept {
  std::intptr_t distance;
  if (__builtin_sub_overflow(b.data, a.data, &distance)) return true;  // exceeds any tensor
  return distance >= a.end - b.begin || distance <= a.begin - b.end || a.begin == a.end ||
         b.begin == b.end;
}

/// True if two elements of the tensor may have the same address. Exact for nested strides:
/// permutations, slices and paddings of compact layouts. Other layouts count as overlapping.
bool overlaps_itself(const TensorView& tensor) noexcept;

/// True if the tensors share a byte. Exact, even for interleaved tensors of one buffer. True if the
/// bounded search ends without a result.
bool share_memory(const TensorView& a, const TensorView& b) noexcept;

}  // namespace flashcore
