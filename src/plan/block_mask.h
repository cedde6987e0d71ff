// The block mask of a call as kernels read it.
#pragma once

#include <bit>

#include "core/block_mask.h"
#include "flashcore/types.h"

namespace flashcore {

/// mask_blocks and mask_bits must be valid; an absent mask_blocks gives an empty mask.
inline core::BlockMask block_mask_of(const TensorView& blocks, const TensorView& bits) noexcept {
  if (!blocks.given()) return {};
  const auto stride = [&](int axis) { return blocks.shape[axis] > 1 ? blocks.strides[axis] : 0; };
  const auto log2 = [](std::int64_t size) {
    return static_cast<std::int32_t>(std::bit_width(static_cast<std::uint64_t>(size))) - 1;
  };
  return {static_cast<const std::int32_t*>(blocks.data),
          static_cast<const std::uint32_t*>(bits.data),
          {stride(0), stride(1), stride(2), stride(3)},
          static_cast<std::int32_t>(bits.shape[0]),
          log2(bits.shape[1]),
          log2(32 * bits.shape[2])};
}

}  // namespace flashcore
