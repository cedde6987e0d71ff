// Shared memory layout of wgmma operands (sm_90): tiles of 16-bit or 8-bit elements in panels of
// 128 bytes a row, with TMA's 128B swizzle. Index arithmetic only, for host and device.
#pragma once

#include <cstdint>

#include "core/config.h"

namespace flashcore::core {

inline constexpr int kPanelRowBytes = 128;
inline constexpr int kStepBytes = 32;       // of a row in one k-step: 16 or 32 elements
inline constexpr int kSwizzleBytes = 1024;  // of the swizzle pattern, 8 rows; alignment of tiles

/// kRows rows in consecutive panels.
template <int kRows, int kColumns, int kElementBytes = 2>
struct PanelTile {
  static constexpr int kPanelColumns = kPanelRowBytes / kElementBytes;
  static constexpr int kPanels = (kColumns + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static_assert(kPanelBytes % kSwizzleBytes == 0);

  /// Byte offset of an element. The row index permutes the 16-byte chunks of a row.
  FLASHCORE_HD static constexpr std::uint32_t offset(int row, int column) {
    const int in_panel = column % kPanelColumns * kElementBytes;
    return static_cast<std::uint32_t>(column / kPanelColumns * kPanelBytes + row * kPanelRowBytes +
                                      (in_panel ^ (row & 7) * 16));
  }

  /// Byte offset of k-step `step` of a K-major operand (Q and K in Q K^T). The hardware swizzles
  /// address bits, so the start is not swizzled here.
  FLASHCORE_HD static constexpr std::uint32_t k_offset(int step) {
    return static_cast<std::uint32_t>(step * kStepBytes / kPanelRowBytes * kPanelBytes +
                                      step * kStepBytes % kPanelRowBytes);
  }

  /// Byte offset of k-step `step`, 16 rows, of an MN-major 16-bit operand (V in P V). 8-bit
  /// operands must be K-major: their V is transposed.
  FLASHCORE_HD static constexpr std::uint32_t mn_offset(int step) {
    return static_cast<std::uint32_t>(step * 16 * kPanelRowBytes);
  }
};

// 8-bit V is transposed: a row for each column of V, keys along the row. Both orders are permuted.
// With permuted keys the accumulators of S become A fragments of P without a shuffle; columns come
// in pairs because ldmatrix transposes 16-bit elements.

/// The key at position `index` of a transposed row, in groups of 16. The four positions of a lane
/// hold the keys of its scores in two n-tiles.
FLASHCORE_HD constexpr int key_at(int index) {
  return 2 * (index % 16 / 4) + index % 2 + 8 * (index / 2 % 2);
}

/// The column of V in a row of the transposed tile. The even columns of 16 come first. A lane
/// then holds four adjacent columns of the output, in two n-tiles.
FLASHCORE_HD constexpr int column_of_row(int row) {
  return row / 16 * 16 + 2 * (row % 8) + row / 8 % 2;
}

/// wgmma matrix descriptor: start address, stride between panels (MN-major operands) and between
/// groups of 8 rows, 128B swizzle.
FLASHCORE_HD constexpr std::uint64_t matrix_descriptor(std::uint32_t s_address,
                                                       std::uint32_t panel_bytes) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  return kSwizzle128 | static_cast<std::uint64_t>(kSwizzleBytes / 16) << 32 |
         static_cast<std::uint64_t>(panel_bytes / 16) << 16 | (s_address & 0x3ffffu) >> 4;
}

/// Advances a descriptor by some bytes. Only the lower half changes, without carry.
FLASHCORE_HD constexpr std::uint64_t advance(std::uint64_t descriptor, std::uint32_t bytes) {
  const std::uint32_t low = static_cast<std::uint32_t>(descriptor) + (bytes >> 4);
  return (descriptor >> 32 << 32) | low;
}

}  // namespace flashcore::core
