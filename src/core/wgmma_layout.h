// How wgmma (sm_90) finds its operands in shared memory: tiles of 16-bit or 8-bit elements in
// panels of 128 bytes a row, as TMA writes them with its 128-byte swizzle. Index arithmetic only,
// for host and device; tests/unit/core/wgmma_layout_test.cc tries all of it.
#pragma once

#include <cstdint>

#include "core/config.h"

namespace flashcore::core {

inline constexpr int kPanelRowBytes = 128;
inline constexpr int kStepBytes = 32;       // of a row, that one product takes: 16 or 32 elements
inline constexpr int kSwizzleBytes = 1024;  // a pattern of 8 rows; tiles start at multiples of it

/// kRows rows in panels, one behind the other.
template <int kRows, int kColumns, int kElementBytes = 2>
struct PanelTile {
  static constexpr int kPanelColumns = kPanelRowBytes / kElementBytes;
  static constexpr int kPanels = (kColumns + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static_assert(kPanelBytes % kSwizzleBytes == 0);

  /// Byte offset of an element: within a row the 16-byte pieces change places by the row's number.
  FLASHCORE_HD static constexpr std::uint32_t offset(int row, int column) {
    const int in_panel = column % kPanelColumns * kElementBytes;
    return static_cast<std::uint32_t>(column / kPanelColumns * kPanelBytes + row * kPanelRowBytes +
                                      (in_panel ^ (row % 8 * 16)));
  }

  /// Byte offset of what product `step` takes of an operand whose k runs along its rows (Q and K in
  /// Q K^T). The hardware swizzles address bits, so the start is not swizzled here.
  FLASHCORE_HD static constexpr std::uint32_t k_offset(int step) {
    return static_cast<std::uint32_t>(step * kStepBytes / kPanelRowBytes * kPanelBytes +
                                      step * kStepBytes % kPanelRowBytes);
  }

  /// Byte offset of 16 rows from row 16 step on, of a 16-bit operand whose k runs across rows (V in
  /// P V). 8-bit operands have no such form: V is transposed for them.
  FLASHCORE_HD static constexpr std::uint32_t mn_offset(int step) {
    return static_cast<std::uint32_t>(step * 16 * kPanelRowBytes);
  }
};

// 8-bit values meet their probabilities transposed: a row for each column of V, the keys along it.
// Accumulators of scores become operands without a lane giving anything to another if the keys of a
// product change places, and columns of a pair of 8-bit elements part where transposing 16-bit
// elements leaves them.

/// Which of 16 keys stands at a place of a product's row: a lane's four places have the keys whose
/// scores it holds, of two n-tiles.
FLASHCORE_HD constexpr int key_at(int place) {
  return 2 * (place % 16 / 4) + place % 2 + 8 * (place / 2 % 2);
}

/// Which column of V a row of the transposed tile has: of 16, first the even ones. A lane then
/// holds four neighbouring columns of the output, in two n-tiles.
FLASHCORE_HD constexpr int column_of_row(int row) {
  return row / 16 * 16 + 2 * (row % 8) + row / 8 % 2;
}

/// A wgmma matrix descriptor: start address, distance between panels (used where n runs along rows)
/// and between groups of 8 rows, 128-byte swizzle.
FLASHCORE_HD constexpr std::uint64_t matrix_descriptor(std::uint32_t s_address,
                                                       std::uint32_t panel_bytes) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  return kSwizzle128 | static_cast<std::uint64_t>(kSwizzleBytes / 16) << 32 |
         static_cast<std::uint64_t>(panel_bytes / 16) << 16 | (s_address & 0x3ffffu) >> 4;
}

/// The descriptor of the same operand some bytes further on. Only the lower half changes: no carry.
FLASHCORE_HD constexpr std::uint64_t advance(std::uint64_t descriptor, std::uint32_t bytes) {
  const std::uint32_t low = static_cast<std::uint32_t>(descriptor) + (bytes >> 4);
  return (descriptor >> 32 << 32) | low;
}

}  // namespace flashcore::core
