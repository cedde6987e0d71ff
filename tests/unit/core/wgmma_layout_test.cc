// core/wgmma_layout.h: the offset of every tile element, and the fields of matrix descriptors.
#include "core/wgmma_layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>

namespace flashcore::core {
namespace {

template <int kRows_, int kColumns_>
struct Shape {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kStoredColumns = (kColumns_ + 63) / 64 * 64;  // a panel is always whole
  using Tile = PanelTile<kRows_, kColumns_>;
};

template <typename S>
class Panels : public testing::Test {};

using Shapes =
    testing::Types<Shape<64, 64>, Shape<64, 96>, Shape<64, 128>, Shape<64, 192>, Shape<64, 256>,
                   Shape<80, 64>, Shape<80, 96>, Shape<80, 128>, Shape<80, 192>, Shape<80, 256>,
                   Shape<96, 96>, Shape<112, 192>, Shape<128, 64>, Shape<128, 96>, Shape<128, 128>,
                   Shape<128, 192>, Shape<128, 256>, Shape<160, 128>, Shape<176, 64>,
                   Shape<176, 96>, Shape<176, 128>, Shape<176, 192>, Shape<176, 256>,
                   Shape<192, 64>, Shape<192, 96>, Shape<192, 128>, Shape<192, 192>,
                   Shape<192, 256>, Shape<208, 64>>;
TYPED_TEST_SUITE(Panels, Shapes);

TYPED_TEST(Panels, HoldEveryElementOnceAndNothingElse) {
  using Tile = typename TypeParam::Tile;
  EXPECT_EQ(Tile::kBytes, 2 * TypeParam::kRows * TypeParam::kStoredColumns);
  std::set<std::uint32_t> offsets;
  for (int row = 0; row < TypeParam::kRows; ++row) {
    for (int column = 0; column < TypeParam::kStoredColumns; ++column) {
      const std::uint32_t offset = Tile::offset(row, column);
      EXPECT_EQ(offset % 2, 0u);
      EXPECT_LT(offset, static_cast<std::uint32_t>(Tile::kBytes));
      EXPECT_TRUE(offsets.insert(offset).second) << "row " << row << " column " << column;
    }
  }
  EXPECT_EQ(2 * offsets.size(), static_cast<std::size_t>(Tile::kBytes));
}

// TMA, wgmma and zero_v_tail() move 16 bytes at a time.
TYPED_TEST(Panels, EightColumnsAreContiguous) {
  using Tile = typename TypeParam::Tile;
  for (int row = 0; row < TypeParam::kRows; ++row) {
    for (int column = 0; column < TypeParam::kStoredColumns; ++column) {
      const std::uint32_t chunk = Tile::offset(row, column / 8 * 8);
      EXPECT_EQ(chunk % 16, 0u);
      EXPECT_EQ(Tile::offset(row, column), chunk + static_cast<std::uint32_t>(column % 8 * 2))
          << "row " << row << " column " << column;
    }
  }
}

TYPED_TEST(Panels, EightRowsOfAChunkHitEightBankGroups) {
  using Tile = typename TypeParam::Tile;
  for (int first = 0; first < TypeParam::kRows; first += 8) {
    for (int column = 0; column < TypeParam::kStoredColumns; column += 8) {
      std::set<std::uint32_t> groups;
      for (int row = first; row < first + 8; ++row) {
        groups.insert(Tile::offset(row, column) / 16 % 8);
      }
      EXPECT_EQ(groups.size(), 8u) << "rows from " << first << " column " << column;
    }
  }
}

// A row of a panel is one 128-byte line, so zero_v_tail() can clear rows past the last key.
TYPED_TEST(Panels, RowOfAPanelIsOneLine) {
  using Tile = typename TypeParam::Tile;
  for (int row = 0; row < TypeParam::kRows; ++row) {
    for (int column = 0; column < TypeParam::kStoredColumns; ++column) {
      const auto line = static_cast<std::uint32_t>(column / 64 * TypeParam::kRows + row);
      EXPECT_EQ(Tile::offset(row, column) / 128, line) << "row " << row << " column " << column;
    }
  }
}

// The swizzle XORs address bits 4-6 with bits 7-9, for every tile. The hardware applies it to
// addresses computed from the start address of an operand, so the start address is not swizzled.
TYPED_TEST(Panels, OperandOffsetsMatchTheHardwareSwizzle) {
  using Tile = typename TypeParam::Tile;
  const auto swizzled = [](std::uint32_t address) { return address ^ (address >> 3 & 0x70); };
  for (int step = 0; step < TypeParam::kColumns / 16; ++step) {
    for (int row = 0; row < TypeParam::kRows; ++row) {
      for (int k = 0; k < 16; ++k) {
        const auto unswizzled =
            Tile::k_offset(step) + static_cast<std::uint32_t>(128 * row + 2 * k);
        EXPECT_EQ(swizzled(unswizzled), Tile::offset(row, 16 * step + k))
            << "step " << step << " row " << row << " k " << k;
      }
    }
  }
  for (int step = 0; step < TypeParam::kRows / 16; ++step) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < TypeParam::kColumns; ++n) {
        const auto unswizzled =
            Tile::mn_offset(step) +
            static_cast<std::uint32_t>(n / 64 * Tile::kPanelBytes + 128 * k + n % 64 * 2);
        EXPECT_EQ(swizzled(unswizzled), Tile::offset(16 * step + k, n))
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
