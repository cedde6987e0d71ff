// core/mma_layout.h: all coordinates of all fragments, the ldmatrix addresses that load them, and
// the swizzled tiles of all shapes in use.
#include "core/mma_layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

namespace flashcore::core {
namespace {

constexpr int kLanes = 32;

using Place = std::pair<int, int>;  // row, column
Place place(Coordinate c) { return {c.row, c.column}; }

/// Expects each of rows × columns elements exactly once among the places.
void expect_each_once(const std::vector<Place>& places, int rows, int columns) {
  const std::set<Place> distinct(places.begin(), places.end());
  EXPECT_EQ(places.size(), static_cast<std::size_t>(rows * columns));
  EXPECT_EQ(distinct.size(), places.size()) << "an element occurs twice";
  for (const auto& [row, column] : places) {
    EXPECT_TRUE(row >= 0 && row < rows && column >= 0 && column < columns)
        << "row " << row << " column " << column;
  }
}

// ---------------------------------------------------------------------------------------------
// Fragments

TEST(MmaFragments, HoldEveryElementOnce) {
  std::vector<Place> a, b, c;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int reg = 0; reg < 4; ++reg) {
      for (int half = 0; half < 2; ++half) {
        a.push_back(place(mma_a(lane, reg, half)));
        if (reg < 2) b.push_back(place(mma_b(lane, reg, half)));
      }
      c.push_back(place(mma_c(lane, reg)));
    }
  }
  expect_each_once(a, 16, 16);
  expect_each_once(b, 16, 8);
  expect_each_once(c, 16, 8);
}

// Some elements of the figures in the PTX manual ("Matrix Fragments for mma.m16n8k16").
TEST(MmaFragments, MatchThePtxManual) {
  EXPECT_EQ(place(mma_a(0, 0, 1)), Place(0, 1));
  EXPECT_EQ(place(mma_a(5, 0, 0)), Place(1, 2));
  EXPECT_EQ(place(mma_a(5, 1, 0)), Place(9, 2));
  EXPECT_EQ(place(mma_a(5, 2, 1)), Place(1, 11));
  EXPECT_EQ(place(mma_a(31, 3, 1)), Place(15, 15));
  EXPECT_EQ(place(mma_b(0, 0, 1)), Place(1, 0));
  EXPECT_EQ(place(mma_b(6, 0, 0)), Place(4, 1));
  EXPECT_EQ(place(mma_b(6, 1, 1)), Place(13, 1));
  EXPECT_EQ(place(mma_b(31, 1, 1)), Place(15, 7));
  EXPECT_EQ(place(mma_c(0, 1)), Place(0, 1));
  EXPECT_EQ(place(mma_c(7, 0)), Place(1, 6));
  EXPECT_EQ(place(mma_c(7, 2)), Place(9, 6));
  EXPECT_EQ(place(mma_c(31, 3)), Place(15, 7));
}

// P V reads P from the accumulator registers of Q K^T: the accumulators of two adjacent n-tiles,
// packed in pairs, are one A operand.
TEST(MmaFragments, AccumulatorsOfTwoTilesAreTheAOperand) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int reg = 0; reg < 4; ++reg) {
      for (int half = 0; half < 2; ++half) {
        const int tile = reg / 2;
        const Coordinate c = mma_c(lane, 2 * (reg % 2) + half);
        EXPECT_EQ(Place(c.row, 8 * tile + c.column), place(mma_a(lane, reg, half)))
            << "lane " << lane << " register " << reg << " half " << half;
      }
    }
  }
}

// The swap-AB mainloop transposes both GEMMs: the accumulators of keys × rows, packed in pairs and
// transposed 8 × 8, are the B operand of keys × rows.
TEST(MmaFragments, TransposedAccumulatorsAreTheBOperand) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int reg = 0; reg < 2; ++reg) {
      for (int half = 0; half < 2; ++half) {
        const Coordinate b = mma_b(lane, reg, half);
        // The transpose takes the element from the lane that holds its row, at this lane's column.
        const int from = 4 * (2 * (lane % 4) + half) + lane / 4 / 2;
        EXPECT_EQ(place(mma_c(from, 2 * reg + lane / 4 % 2)), place(b))
            << "lane " << lane << " register " << reg << " half " << half;
      }
    }
  }
}

// Lanes with the same lane % 4, and no others, hold a column. cross_quad_max() and cross_quad_sum()
// rely on this.
TEST(MmaFragments, LanesEqualModulo4HoldAColumn) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int reg = 0; reg < 4; ++reg) {
      EXPECT_EQ(mma_c(lane, reg).column, mma_c(lane % 4, reg).column);
      EXPECT_EQ(mma_c(lane, reg).column / 2, lane % 4);
    }
  }
}

// The four lanes of a quad, and no others, hold a row. quad_max() and quad_sum() rely on this.
TEST(MmaFragments, LanesOfAQuadHoldARow) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int reg = 0; reg < 4; ++reg) {
      EXPECT_EQ(mma_c(lane, reg).row, mma_c(lane / 4 * 4, reg).row);
      EXPECT_EQ(mma_c(lane, reg).row % 8, lane / 4);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// ldmatrix

/// Emulates ldmatrix.x4: returns the tile element that `half` of register `reg` of a lane receives.
/// `row_of(lane)` is the 16-byte row whose address a lane passes, as (row of the tile, chunk of 8
/// columns).
template <typename RowOf>
Place loaded(RowOf row_of, int lane, int reg, int half, bool transposed) {
  const int outer = lane / 4, inner = 2 * (lane % 4) + half;
  const int row = transposed ? inner : outer, column = transposed ? outer : inner;
  const Coordinate source = row_of(8 * reg + row);
  return {source.row, 8 * source.column + column};
}

template <typename Check>
void for_each_element(Check check) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int reg = 0; reg < 4; ++reg) {
      for (int half = 0; half < 2; ++half) {
        SCOPED_TRACE(testing::Message()
                     << "lane " << lane << " register " << reg << " half " << half);
        check(lane, reg, half);
      }
    }
  }
}

TEST(Ldmatrix, LoadsTheAOperand) {
  for_each_element([](int lane, int reg, int half) {
    EXPECT_EQ(loaded(ldmatrix_a, lane, reg, half, false), place(mma_a(lane, reg, half)));
  });
}

TEST(Ldmatrix, LoadsTheBOperandsFromRowsOfKeys) {
  for_each_element([](int lane, int reg, int half) {
    const Coordinate b = mma_b(lane, reg % 2, half);  // row k, column n of n-tile reg / 2
    EXPECT_EQ(loaded(ldmatrix_b, lane, reg, half, false), Place(8 * (reg / 2) + b.column, b.row));
  });
}

TEST(Ldmatrix, TransposedLoadsTheBOperandsFromRowsOfKeys) {
  for_each_element([](int lane, int reg, int half) {
    const Coordinate b = mma_b(lane, reg % 2, half);
    EXPECT_EQ(loaded(ldmatrix_b_trans, lane, reg, half, true),
              Place(b.row, 8 * (reg / 2) + b.column));
  });
}

TEST(Ldmatrix, LoadsTheBOperandsOfTwoSteps) {
  for_each_element([](int lane, int reg, int half) {
    const Coordinate b = mma_b(lane, reg % 2, half);  // row k of k-step reg / 2, column n
    EXPECT_EQ(loaded(ldmatrix_b_two_steps, lane, reg, half, false),
              Place(b.column, 16 * (reg / 2) + b.row));
  });
}

TEST(Ldmatrix, TransposedLoadsTheAOperand) {
  for_each_element([](int lane, int reg, int half) {
    const Coordinate a = mma_a(lane, reg, half);
    EXPECT_EQ(loaded(ldmatrix_a_trans, lane, reg, half, true), Place(a.column, a.row));
  });
}

// ---------------------------------------------------------------------------------------------
// Swizzled tiles

template <int kRows_, int kColumns_>
struct Shape {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  using Tile = SwizzledTile<kRows_, kColumns_>;
};

template <typename S>
class Swizzle : public testing::Test {
 protected:
  static constexpr int kRows = S::kRows;
  static constexpr int kChunks = S::kColumns / 8;

  /// The 32 banks form eight groups of 16 bytes. Returns the group of an address.
  static int banks(std::int64_t address) { return static_cast<int>(address / 16 % 8); }
};

using Shapes =
    testing::Types<Shape<8, 64>, Shape<8, 128>, Shape<16, 32>, Shape<16, 64>, Shape<16, 96>,
                   Shape<16, 128>, Shape<16, 160>, Shape<16, 192>, Shape<16, 256>, Shape<32, 64>,
                   Shape<32, 96>, Shape<32, 128>, Shape<32, 192>, Shape<32, 256>, Shape<48, 64>,
                   Shape<48, 96>, Shape<48, 128>, Shape<64, 32>, Shape<64, 64>, Shape<64, 96>,
                   Shape<64, 128>, Shape<64, 192>, Shape<64, 224>, Shape<64, 256>, Shape<80, 128>,
                   Shape<96, 64>, Shape<96, 128>, Shape<112, 64>, Shape<128, 32>, Shape<128, 64>,
                   Shape<128, 96>, Shape<128, 128>, Shape<128, 192>, Shape<128, 256>,
                   Shape<192, 64>, Shape<256, 64>>;
TYPED_TEST_SUITE(Swizzle, Shapes);

TYPED_TEST(Swizzle, IsABijectionOntoTheTile) {
  using Tile = typename TypeParam::Tile;
  std::set<int> offsets;
  for (int row = 0; row < this->kRows; ++row) {
    for (int chunk = 0; chunk < this->kChunks; ++chunk) {
      const int offset = Tile::offset(row, chunk);
      EXPECT_EQ(offset % 16, 0);
      EXPECT_GE(offset, 0);
      EXPECT_LE(offset + 16, 2 * Tile::kElements);
      EXPECT_TRUE(offsets.insert(offset).second) << "row " << row << " chunk " << chunk;
    }
  }
  EXPECT_EQ(static_cast<int>(offsets.size()) * 8, Tile::kElements);
}

// ldmatrix reads the eight rows of one matrix in one access.
TYPED_TEST(Swizzle, EightRowsOfAChunkHitEightBankGroups) {
  using Tile = typename TypeParam::Tile;
  for (int first = 0; first + 8 <= this->kRows; first += 8) {
    for (int chunk = 0; chunk < this->kChunks; ++chunk) {
      std::set<int> groups;
      for (int row = first; row < first + 8; ++row) {
        groups.insert(this->banks(Tile::offset(row, chunk)));
      }
      EXPECT_EQ(groups.size(), 8u) << "rows from " << first << " chunk " << chunk;
    }
  }
}

// Copies go in the order of panel, row and chunk. Eight lanes write their 16 bytes in one access.
TYPED_TEST(Swizzle, EightAdjacentCopiesHitEightBankGroups) {
  using Tile = typename TypeParam::Tile;
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    for (int index = 0; index < this->kRows * Tile::kPanelChunks; index += 8) {
      std::set<int> groups;
      for (int lane = index; lane < index + 8; ++lane) {
        groups.insert(this->banks(Tile::offset(
            lane / Tile::kPanelChunks, panel * Tile::kPanelChunks + lane % Tile::kPanelChunks)));
      }
      EXPECT_EQ(groups.size(), 8u) << "panel " << panel << " copies from " << index;
    }
  }
}

// advance_k() and advance_rows8() reach every address of a lane from its first one, which may be at
// any row and at chunk 0 or 1, or at chunk 0 to 3 if n is even. The tile may begin at any multiple
// of 128 bytes.
TYPED_TEST(Swizzle, AdvanceReachesEveryOffset) {
  using Tile = typename TypeParam::Tile;
  for (const unsigned base : {0u, 128u, 1024u + 384u, 99968u}) {
    for (int row = 0; row < this->kRows; ++row) {
      for (int chunk = 0; chunk < (Tile::kPanelColumns == 64 ? 4 : 2); ++chunk) {
        const unsigned first = base + static_cast<unsigned>(Tile::offset(row, chunk));
        for (int n = 0; 2 * n + chunk < this->kChunks; n += chunk < 2 ? 1 : 2) {
          ASSERT_EQ(Tile::advance_k(first, n),
                    base + static_cast<unsigned>(Tile::offset(row, chunk + 2 * n)))
              << "base " << base << " row " << row << " chunk " << chunk << " advance_k " << n;
        }
        for (int n = 0; row + 8 * n < this->kRows; ++n) {
          const unsigned below = Tile::advance_rows8(first, n);
          ASSERT_EQ(below, base + static_cast<unsigned>(Tile::offset(row + 8 * n, chunk)))
              << "base " << base << " row " << row << " chunk " << chunk << " advance_rows8 " << n;
          const int last = chunk < 2 ? (this->kChunks - 1 - chunk) / 2 : 0;
          ASSERT_EQ(Tile::advance_k(below, last),
                    Tile::advance_rows8(Tile::advance_k(first, last), n));
        }
      }
    }
  }
}

// A thread keeps one address for all its copies: chunk c of panel p is p * kPanelBytes after chunk
// c of panel 0.
TYPED_TEST(Swizzle, PanelsHaveEqualLayouts) {
  using Tile = typename TypeParam::Tile;
  for (int row = 0; row < this->kRows; ++row) {
    for (int chunk = 0; chunk < this->kChunks; ++chunk) {
      EXPECT_EQ(Tile::offset(row, chunk), Tile::offset(row, chunk % Tile::kPanelChunks) +
                                              chunk / Tile::kPanelChunks * Tile::kPanelBytes);
    }
  }
}

}  // namespace
}  // namespace flashcore::core
