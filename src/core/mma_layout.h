// Layouts of mma.sync operands: the fragments of mma.m16n8k16, the row addresses of ldmatrix, and
// the swizzle of tiles in shared memory. Host tests cover every coordinate.
#pragma once

#include "core/config.h"

namespace flashcore::core {

struct Coordinate {
  int row;
  int column;
};

// ---------------------------------------------------------------------------------------------
// Fragments of mma.m16n8k16: D[16][8] = A[16][16] B[16][8] + C[16][8].

/// A (16 × 16): element `half` (0, 1) of register `reg` (0 … 3).
FLASHCORE_HD constexpr Coordinate mma_a(int lane, int reg, int half) {
  return {lane / 4 + 8 * (reg % 2), 2 * (lane % 4) + 8 * (reg / 2) + half};
}

/// B (16 × 8): element `half` of register `reg` (0, 1). row: k, column: n.
FLASHCORE_HD constexpr Coordinate mma_b(int lane, int reg, int half) {
  return {2 * (lane % 4) + 8 * reg + half, lane / 4};
}

/// C and D (16 × 8): f32 register `reg` (0 … 3).
FLASHCORE_HD constexpr Coordinate mma_c(int lane, int reg) {
  return {lane / 4 + 8 * (reg / 2), 2 * (lane % 4) + reg % 2};
}

// ---------------------------------------------------------------------------------------------
// ldmatrix.x4: lane l supplies the address of one 16-byte row (8 elements); lanes 8 i to 8 i + 7
// address matrix i, which goes to register i. row: of the tile; column: in chunks of 8 elements.

/// A operand, 16 rows × 16 columns of a row-major tile.
FLASHCORE_HD constexpr Coordinate ldmatrix_a(int lane) { return {lane % 16, lane / 16}; }

/// B operand of two adjacent n-tiles from a tile that holds B transposed (keys as rows): 16
/// rows n × 16 columns k. Registers 0, 1: n-tile 0; 2, 3: n-tile 1.
FLASHCORE_HD constexpr Coordinate ldmatrix_b(int lane) {
  return {lane % 8 + 8 * (lane / 16), lane / 8 % 2};
}

/// B operand of two adjacent n-tiles from a row-major tile, by ldmatrix.trans: 16 rows k × 16
/// columns n.
FLASHCORE_HD constexpr Coordinate ldmatrix_b_trans(int lane) { return {lane % 16, lane / 16}; }

/// B operand of one n-tile and two adjacent k-steps from a tile that holds B transposed: 8 rows
/// n × 32 columns k. Registers 0, 1: the first k-step; 2, 3: the second.
FLASHCORE_HD constexpr Coordinate ldmatrix_b_two_steps(int lane) { return {lane % 8, lane / 8}; }

/// A operand from a tile that holds A transposed, by ldmatrix.trans: 16 rows k × 16 columns m.
FLASHCORE_HD constexpr Coordinate ldmatrix_a_trans(int lane) {
  return {lane % 8 + 8 * (lane / 16), lane / 8 % 2};
}

// ---------------------------------------------------------------------------------------------
// 8-bit elements (dequant_f16.h). ldmatrix moves pairs of them as 16-bit elements, with the
// coordinates above; a chunk holds 16 of them.

/// Index of the 8-bit element that becomes k or n index `place` of an operand: first the even
/// elements of a chunk, then the odd ones. A chunk of K becomes one k-step, a chunk of V two
/// n-tiles.
FLASHCORE_HD constexpr int even_odd_index(int place) { return 2 * (place % 8) + place / 8; }

// ---------------------------------------------------------------------------------------------

/// A swizzled tile of 16-bit elements in shared memory. ldmatrix reads it without bank conflicts:
/// the 16-byte chunks of eight adjacent rows are in different banks. The tile consists of panels of
/// 64 columns (128-byte rows), or of 32 columns if its width is an odd multiple of 32. XOR permutes
/// the chunks of a row within a panel. The tile is aligned to 128 bytes.
template <int kRows, int kColumns>
struct SwizzledTile {
  static_assert(kColumns % 32 == 0);
  static constexpr int kPanelColumns = kColumns % 64 == 0 ? 64 : 32;
  static constexpr int kPanelChunks = kPanelColumns / 8;
  static constexpr int kPanels = kColumns / kPanelColumns;
  static constexpr int kPanelBytes = kRows * kPanelColumns * 2;
  static constexpr int kElements = kRows * kColumns;

  /// Byte offset of chunk `chunk` (of kColumns / 8) of row `row`. Rows of 128 bytes all begin at
  /// the same bank, so eight rows use eight permutations. Rows of 64 bytes begin at two banks, so
  /// four permutations suffice.
  FLASHCORE_HD static constexpr int offset(int row, int chunk) {
    const int swap = kPanelColumns == 64 ? row % 8 : row / 2 % 4;
    return chunk / kPanelChunks * kPanelBytes + row * kPanelColumns * 2 +
           16 * ((chunk % kPanelChunks) ^ swap);
  }

  /// The address 2 n chunks to the right of `address`, the address of chunk 0 or 1 of a row (or of
  /// chunk 0 to 3 if n is even). One XOR suffices: the bits that it changes are 0 in the chunk
  /// index.
  FLASHCORE_HD static constexpr unsigned advance_k(unsigned address, int n) {
    constexpr int kPairs = kPanelChunks / 2;
    return (address ^ static_cast<unsigned>(32 * (n % kPairs))) +
           static_cast<unsigned>(n / kPairs * kPanelBytes);
  }

  /// The address 4 n rows below `address`, the address of one of the first four rows of eight.
  FLASHCORE_HD static constexpr unsigned advance_rows4(unsigned address, int n) {
    static_assert(kPanelColumns == 64);
    return (n % 2 == 0 ? address : address ^ 64u) + static_cast<unsigned>(4 * n * 128);
  }

  /// The address 8 n rows below.
  FLASHCORE_HD static constexpr unsigned advance_rows8(unsigned address, int n) {
    return address + static_cast<unsigned>(8 * n * kPanelColumns * 2);
  }
};

}  // namespace flashcore::core
