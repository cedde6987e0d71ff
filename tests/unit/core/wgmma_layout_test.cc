// core/wgmma_layout.h: the offset of every tile element, and the fields of matrix descriptors.
#include "core/wgmma_layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>

namespace flashcore::core {
namespace {

/// A tile as values: one test body for all shapes compiles five times faster than a typed test.
struct TileOfShape {
  int rows, columns;
  int stored_columns;  // a panel is always whole
  int bytes, panel_bytes;
  std::uint32_t (*offset)(int row, int column);
  std::uint32_t (*k_offset)(int step);
  std::uint32_t (*mn_offset)(int step);
};

template <int kRows, int kColumns>
TileOfShape shape() {
  using Tile = PanelTile<kRows, kColumns>;
  return {kRows,
          kColumns,
          (kColumns + 63) / 64 * 64,
          Tile::kBytes,
          Tile::kPanelBytes,
          [](int row, int column) { return Tile::offset(row, column); },
          [](int step) { return Tile::k_offset(step); },
          [](int step) { return Tile::mn_offset(step); }};
}

class Panels : public testing::TestWithParam<TileOfShape> {
 protected:
  const TileOfShape& tile = GetParam();
};

const TileOfShape kShapes[] = {
    shape<64, 64>(),   shape<64, 96>(),   shape<64, 128>(),  shape<64, 192>(), shape<64, 256>(),
    shape<80, 64>(),   shape<80, 96>(),   shape<80, 128>(),  shape<80, 192>(), shape<80, 256>(),
    shape<96, 96>(),   shape<112, 192>(), shape<128, 64>(),  shape<128, 96>(), shape<128, 128>(),
    shape<128, 192>(), shape<128, 256>(), shape<160, 128>(), shape<176, 64>(), shape<176, 96>(),
    shape<176, 128>(), shape<176, 192>(), shape<176, 256>(), shape<192, 64>(), shape<192, 96>(),
    shape<192, 128>(), shape<192, 192>(), shape<192, 256>(), shape<208, 64>()};

INSTANTIATE_TEST_SUITE_P(Shapes, Panels, testing::ValuesIn(kShapes),
                         [](const testing::TestParamInfo<TileOfShape>& one) {
                           return std::to_string(one.param.rows) + "x" +
                                  std::to_string(one.param.columns);
                         });

TEST_P(Panels, HoldEveryElementOnceAndNothingElse) {
  EXPECT_EQ(tile.bytes, 2 * tile.rows * tile.stored_columns);
  std::set<std::uint32_t> offsets;
  for (int row = 0; row < tile.rows; ++row) {
    for (int column = 0; column < tile.stored_columns; ++column) {
      const std::uint32_t offset = tile.offset(row, column);
      EXPECT_EQ(offset % 2, 0u);
      EXPECT_LT(offset, static_cast<std::uint32_t>(tile.bytes));
      EXPECT_TRUE(offsets.insert(offset).second) << "row " << row << " column " << column;
    }
  }
  EXPECT_EQ(2 * offsets.size(), static_cast<std::size_t>(tile.bytes));
}

// TMA, wgmma and zero_v_tail() move 16 bytes at a time.
TEST_P(Panels, EightColumnsAreContiguous) {
  for (int row = 0; row < tile.rows; ++row) {
    for (int column = 0; column < tile.stored_columns; ++column) {
      const std::uint32_t chunk = tile.offset(row, column / 8 * 8);
      EXPECT_EQ(chunk % 16, 0u);
      EXPECT_EQ(tile.offset(row, column), chunk + static_cast<std::uint32_t>(column % 8 * 2))
          << "row " << row << " column " << column;
    }
  }
}

TEST_P(Panels, EightRowsOfAChunkHitEightBankGroups) {
  for (int first = 0; first < tile.rows; first += 8) {
    for (int column = 0; column < tile.stored_columns; column += 8) {
      std::set<std::uint32_t> groups;
      for (int row = first; row < first + 8; ++row) {
        groups.insert(tile.offset(row, column) / 16 % 8);
      }
      EXPECT_EQ(groups.size(), 8u) << "rows from " << first << " column " << column;
    }
  }
}

// A row of a panel is one 128-byte line, so zero_v_tail() can clear rows past the last key.
TEST_P(Panels, RowOfAPanelIsOneLine) {
  for (int row = 0; row < tile.rows; ++row) {
    for (int column = 0; column < tile.stored_columns; ++column) {
      const auto line = static_cast<std::uint32_t>(column / 64 * tile.rows + row);
      EXPECT_EQ(tile.offset(row, column) / 128, line) << "row " << row << " column " << column;
    }
  }
}

// The swizzle XORs address bits 4-6 with bits 7-9, for every tile. The hardware applies it to
// addresses computed from the start address of an operand, so the start address is not swizzled.
TEST_P(Panels, OperandOffsetsMatchTheHardwareSwizzle) {
  const auto swizzled = [](std::uint32_t address) { return address ^ (address >> 3 & 0x70); };
  for (int step = 0; step < tile.columns / 16; ++step) {
    for (int row = 0; row < tile.rows; ++row) {
      for (int k = 0; k < 16; ++k) {
        const auto unswizzled = tile.k_offset(step) + static_cast<std::uint32_t>(128 * row + 2 * k);
        EXPECT_EQ(swizzled(unswizzled), tile.offset(row, 16 * step + k))
            << "step " << step << " row " << row << " k " << k;
      }
    }
  }
  for (int step = 0; step < tile.rows / 16; ++step) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < tile.columns; ++n) {
        const auto unswizzled =
            tile.mn_offset(step) +
            static_cast<std::uint32_t>(n / 64 * tile.panel_bytes + 128 * k + n % 64 * 2);
        EXPECT_EQ(swizzled(unswizzled), tile.offset(16 * step + k, n))
            << "step " << step << " k " << k << " column " << n;
      }
    }
  }
}

// The offset of an element depends on the rows of its tile, not on the columns.
TEST(PanelTiles, OffsetsDependOnRowsOnly) {
  for (int row = 0; row < 80; ++row) {
    for (int column = 0; column < 96; ++column) {
      const std::uint32_t offset = PanelTile<80, 256>::offset(row, column);
      EXPECT_EQ((PanelTile<80, 96>::offset(row, column)), offset);
      EXPECT_EQ((PanelTile<80, 128>::offset(row, column)), offset);
    }
  }
}

/// The fields of a matrix descriptor, after "Matrix Descriptor Format" in the PTX manual. Sizes are
/// in bytes.
struct Fields {
  std::uint32_t start, leading, stride, base_offset, swizzle, unused;
};

Fields decoded(std::uint64_t descriptor) {
  const auto bits = [&](int first, int last) {
    return static_cast<std::uint32_t>(descriptor >> first &
                                      ((std::uint64_t{1} << (last - first + 1)) - 1));
  };
  return {bits(0, 13) * 16,  bits(16, 29) * 16,
          bits(32, 45) * 16, bits(49, 51),
          bits(62, 63),      bits(14, 15) | bits(30, 31) | bits(46, 48) | bits(52, 61)};
}

constexpr std::uint32_t kSharedBytes = 228 * 1024;  // of an SM

TEST(MatrixDescriptor, EncodesItsFields) {
  for (std::uint32_t address = 0; address < kSharedBytes; address += 1024) {
    for (const int rows : {0, 64, 80, 96, 112, 128, 160, 176, 192, 208, 256}) {
      const auto panel_bytes = static_cast<std::uint32_t>(rows * kPanelRowBytes);
      const Fields fields = decoded(matrix_descriptor(address, panel_bytes));
      EXPECT_EQ(fields.start, address);
      EXPECT_EQ(fields.leading, panel_bytes);
      EXPECT_EQ(fields.stride, 1024u);  // 8 rows of 128 bytes
      EXPECT_EQ(fields.base_offset, 0u);
      EXPECT_EQ(fields.swizzle, 1u);  // of 128 bytes
      EXPECT_EQ(fields.unused, 0u);
    }
  }
}

TEST(MatrixDescriptor, AdvanceChangesTheAddressOnly) {
  for (std::uint32_t address = 0; address < kSharedBytes; address += 1024) {
    const std::uint64_t descriptor = matrix_descriptor(address, 176 * kPanelRowBytes);
    for (std::uint32_t bytes = 0; address + bytes < kSharedBytes; bytes += 16) {
      const std::uint64_t moved = advance(descriptor, bytes);
      ASSERT_EQ(moved >> 14, descriptor >> 14) << "from " << address << " by " << bytes;
      ASSERT_EQ(decoded(moved).start, address + bytes) << "from " << address << " by " << bytes;
    }
  }
}

// 8-bit tiles use the same panels with twice the columns.
TEST(Fp8Panels, UseThe16BitLayout) {
  using Tile = PanelTile<192, 256, 1>;
  using Halves = PanelTile<192, 128>;
  static_assert(Tile::kBytes == Halves::kBytes && Tile::kPanelColumns == 128);
  for (int row = 0; row < 192; ++row) {
    for (int column = 0; column < 256; ++column) {
      EXPECT_EQ(Tile::offset(row, column),
                Halves::offset(row, column / 2) + static_cast<std::uint32_t>(column % 2));
    }
  }
  for (int step = 0; step < 8; ++step) EXPECT_EQ(Tile::k_offset(step), Halves::k_offset(step));
}

// The A operand of 32 keys in a lane holds the lane's own accumulators of four n-tiles.
TEST(Fp8Operands, OperandOfPHoldsTheScoresOfItsLane) {
  std::set<int> keys;
  for (int place = 0; place < 16; ++place) keys.insert(key_at(place));
  EXPECT_EQ(keys.size(), 16u);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int place = 4 * (lane % 4) + i;  // A operand of mma.m16n8k32, registers 0 and 1
      const int n_tile = i / 2, in_tile = 2 * (lane % 4) + i % 2;
      EXPECT_EQ(key_at(place), 8 * n_tile + in_tile);
      EXPECT_EQ(key_at(16 + place), key_at(place));
    }
  }
}

// A lane holds columns 2 (lane % 4) and the next one of every n-tile. The transposed V maps two
// n-tiles to four adjacent columns of V.
TEST(Fp8Operands, TransposedVGivesFourAdjacentColumns) {
  std::set<int> columns;
  for (int row = 0; row < 64; ++row) columns.insert(column_of_row(row));
  EXPECT_EQ(columns.size(), 64u);
  for (int pair = 0; pair < 4; ++pair) {
    for (int member = 0; member < 4; ++member) {
      for (int i = 0; i < 4; ++i) {
        const int row = 16 * pair + 8 * (i % 2) + 2 * member + i / 2;
        EXPECT_EQ(column_of_row(row), 16 * pair + 4 * member + i);
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::core
