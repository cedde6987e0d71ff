// Checks of block masks (flashcore/block_mask.h).
#pragma once

#include "flashcore/problem.h"

namespace flashcore {

/// Checks a block size. The limits are part of the messages.
Status check_block_size(const char* name, std::int64_t size, std::int64_t least) noexcept;
inline constexpr std::int64_t kLeastBlockQ = 16, kLeastBlockK = 32, kLargestBlock = 1024;

/// Checks mask_blocks and mask_bits against each other, and mask_blocks against the sizes of the
/// problem. Fills in the problem's block mask.
Status describe_block_mask(const Tensors& tensors, Problem& problem) noexcept;

/// Checks mask_bits alone and reads the block size from its shape.
Status check_mask_bits(const TensorView& bits, std::int64_t& block_q,
                       std::int64_t& block_k) noexcept;

}  // namespace flashcore
