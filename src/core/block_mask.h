// A mask by blocks of queries and keys, as kernels read it (flashcore/block_mask.h).
#pragma once

#include <cstdint>

#include "core/config.h"
#include "core/fault.h"
#include "core/strides.h"

namespace flashcore::core {

// Values of BlockMask::blocks. kMixedBlock + n: tile n of `bits` has the block's bits. Other values
// hide the block, so an invalid entry never makes a kernel read outside the tensors.
inline constexpr std::int32_t kHiddenBlock = 0, kVisibleBlock = 1, kMixedBlock = 2;

struct BlockMask {
  const std::int32_t* blocks;  // [batch, q_heads, q_blocks, k_blocks]; null: no block mask
  const std::uint32_t* bits;   // [tiles, block_q, block_k / 32]: bit j of word w is key 32 w + j
  Strides strides;             // of blocks
  std::int32_t tiles;
  std::int32_t q_shift, k_shift;  // log2 of block_q and block_k

  FLASHCORE_HD constexpr bool given() const { return blocks != nullptr; }

  /// The entries of the block row that contains a query.
  FLASHCORE_HD constexpr const std::int32_t* row(std::int32_t b, std::int32_t h,
                                                 std::int32_t query) const {
    return blocks + b * strides.batch + h * strides.head + (query >> q_shift) * strides.row;
  }
  /// The entry of a key in a block row; kHiddenBlock if it is invalid.
  FLASHCORE_HD constexpr std::int32_t entry(const std::int32_t* row, std::int32_t key) const {
    const std::int32_t value = row[(key >> k_shift) * strides.column];
    return value >= kHiddenBlock && value < kMixedBlock + tiles ? value : kHiddenBlock;
  }
  /// Bit j: the query sees key j of the 32 keys that contain `key`, given their block's entry.
  FLASHCORE_HD constexpr std::uint32_t word(std::int32_t entry, std::int32_t query,
                                            std::int32_t key) const {
    if (entry < kMixedBlock) return entry == kVisibleBlock ? ~0u : 0u;
    const std::int32_t tile_row = query & ((1 << q_shift) - 1), column = key & ((1 << k_shift) - 1);
    const std::int64_t first =
        ((static_cast<std::int64_t>(entry - kMixedBlock) << q_shift) + tile_row) << (k_shift - 5);
    return bits[first + column / 32];
  }
  /// Whether the query sees the key, given its block's entry.
  FLASHCORE_HD constexpr bool shows(std::int32_t entry, std::int32_t query,
                                    std::int32_t key) const {
    return (word(entry, query, key) >> (key % 32) & 1u) != 0;
  }
  FLASHCORE_HD constexpr bool shows(const std::int32_t* row, std::int32_t query,
                                    std::int32_t key) const {
    return shows(entry(row, key), query, key);
  }
  /// True if no query of [first, last] sees a key of [begin, end) of a head. Requires keys.
  FLASHCORE_HD constexpr bool hides(std::int32_t b, std::int32_t h, std::int32_t first,
                                    std::int32_t last, std::int32_t begin, std::int32_t end) const {
    FLASHCORE_LOOP
    for (std::int32_t q = first >> q_shift; q <= last >> q_shift; ++q) {
      FLASHCORE_LOOP
      for (std::int32_t k = begin >> k_shift; k <= (end - 1) >> k_shift; ++k) {
        if (entry(row(b, h, q << q_shift), k << k_shift) != kHiddenBlock) return false;
      }
    }
    return true;
  }
};

}  // namespace flashcore::core
