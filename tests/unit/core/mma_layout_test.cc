// core/mma_layout.h: every coordinate of every fragment, the addresses of ldmatrix against them,
// and the swizzled tiles of every shape a kernel may ask for.
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

/// Each of rows × columns elements stands exactly once among the places.
void expect_each_once(const std::vector<Place>& places, int rows, int columns) {
  const std::set<Place> different(places.begin(), places.end());
  EXPECT_EQ(places.size(), static_cast<std::size_t>(rows * columns));
  EXPECT_EQ(different.size(), places.size()) << "an element stands twice";
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

// The figures of the PTX manual ("Matrix Fragments for mma.m16n8k16"), some corners of them.
TEST(MmaFragments, AreThoseOfTheInstruction) {
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

// P V takes the scores where Q K^T left them: the accumulators of two neighbouring n-tiles, packed
// in pairs, are one A operand.
TEST(MmaFragments, AccumulatorsOfTwoTilesAreAnOperand) {
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

// With few rows the products are transposed: the accumulators of keys × rows, packed in pairs and
// transposed 8 × 8, are the B operand of keys × rows.
TEST(MmaFragments, AnAccumulatorTileTransposedIsAnOperand) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int reg = 0; reg < 2; ++reg) {
      for (int half = 0; half < 2; ++half) {
        const Coordinate b = mma_b(lane, reg, half);
        // Transposed, the element comes from the lane whose row it was, at this lane's place.
        const int from = 4 * (2 * (lane % 4) + half) + lane / 4 / 2;
        EXPECT_EQ(place(mma_c(from, 2 * reg + lane / 4 % 2)), place(b))
            << "lane " << lane << " register " << reg << " half " << half;
      }
    }
  }
}

// Lanes with the same lane % 4, and no others, hold a column: what cross_quad_max() and
// cross_quad_sum() rely on.
TEST(MmaFragments, LanesAtOnePlaceHoldAColumn) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int reg = 0; reg < 4; ++reg) {
      EXPECT_EQ(mma_c(lane, reg).column, mma_c(lane % 4, reg).column);
      EXPECT_EQ(mma_c(lane, reg).column / 2, lane % 4);
    }
  }
}

// The four lanes of a quad, and no others, hold a row: what quad_max() and quad_sum() rely on.
TEST(MmaFragments, AQuadHoldsARow) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int reg = 0; reg < 4; ++reg) {
      EXPECT_EQ(mma_c(lane, reg).row, mma_c(lane / 4 * 4, reg).row);
      EXPECT_EQ(mma_c(lane, reg).row % 8, lane / 4);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// ldmatrix

/// What ldmatrix.x4 does: `row_of(lane)` is the 16-byte row a lane names, as (row of the tile,
/// chunk of 8 columns). The element of the tile that a lane finds in a half of a register.
template <typename RowOf>
Place loaded(RowOf row_of, int lane, int reg, int half, bool transposed) {
  const int outer = lane / 4, inner = 2 * (lane % 4) + half;
  const int row = transposed ? inner : outer, column = transposed ? outer : inner;
  const Coordinate named = row_of(8 * reg + row);
  return {named.row, 8 * named.column + column};
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

TEST(Ldmatrix, GivesTheAOperand) {
  for_each_element([](int lane, int reg, int half) {
    EXPECT_EQ(loaded(ldmatrix_a, lane, reg, half, false), place(mma_a(lane, reg, half)));
  });
}

TEST(Ldmatrix, GivesTheBOperandsFromKeysAsRows) {
  for_each_element([](int lane, int reg, int half) {
    const Coordinate b = mma_b(lane, reg % 2, half);  // row k, column n of n-tile reg / 2
    EXPECT_EQ(loaded(ldmatrix_b, lane, reg, half, false), Place(8 * (reg / 2) + b.column, b.row));
  });
}

TEST(Ldmatrix, TransposedGivesTheBOperandsFromKeysAsRows) {
  for_each_element([](int lane, int reg, int half) {
    const Coordinate b = mma_b(lane, reg % 2, half);
    EXPECT_EQ(loaded(ldmatrix_b_trans, lane, reg, half, true),
              Place(b.row, 8 * (reg / 2) + b.column));
  });
}

TEST(Ldmatrix, GivesTheBOperandOfTwoSteps) {
  for_each_element([](int lane, int reg, int half) {
    const Coordinate b = mma_b(lane, reg % 2, half);  // row k of k-step reg / 2, column n
    EXPECT_EQ(loaded(ldmatrix_b_two_steps, lane, reg, half, false),
              Place(b.column, 16 * (reg / 2) + b.row));
  });
}

TEST(Ldmatrix, TransposedGivesTheAOperandFromColumnsAsRows) {
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

  /// Of the eight 16-byte groups that the 32 banks make, the one an address lies in.
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

// ldmatrix reads the eight rows of one matrix at once.
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

// Copies are made in order of panel, row and chunk; eight lanes write their 16 bytes at once.
TYPED_TEST(Swizzle, EightNeighbouringCopiesHitEightBankGroups) {
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

// From a lane's first address, at any row and at chunk 0 or 1 (0 to 3 for every other step), every
// other one is reached by steps to the right and below; wherever the tile begins, as long as that
// is a multiple of 128 bytes.
TYPED_TEST(Swizzle, StepsToTheRightAndBelowLeadToTheOffsets) {
  using Tile = typename TypeParam::Tile;
  for (const unsigned base : {0u, 128u, 1024u + 384u, 99968u}) {
    for (int row = 0; row < this->kRows; ++row) {
      for (int chunk = 0; chunk < (Tile::kPanelColumns == 64 ? 4 : 2); ++chunk) {
        const unsigned first = base + static_cast<unsigned>(Tile::offset(row, chunk));
        for (int n = 0; 2 * n + chunk < this->kChunks; n += chunk < 2 ? 1 : 2) {
          ASSERT_EQ(Tile::advance_k(first, n),
                    base + static_cast<unsigned>(Tile::offset(row, chunk + 2 * n)))
              << "base " << base << " row " << row << " chunk " << chunk << " right " << n;
        }
        for (int n = 0; row + 8 * n < this->kRows; ++n) {
          const unsigned there = Tile::advance_rows8(first, n);
          ASSERT_EQ(there, base + static_cast<unsigned>(Tile::offset(row + 8 * n, chunk)))
              << "base " << base << " row " << row << " chunk " << chunk << " below " << n;
          const int last = chunk < 2 ? (this->kChunks - 1 - chunk) / 2 : 0;
          ASSERT_EQ(Tile::advance_k(there, last),
                    Tile::advance_rows8(Tile::advance_k(first, last), n));
        }
      }
    }
  }
}

// A copy's place is given by one address per thread and the panel's size: chunk c of panel p is
// chunk c of panel 0, kPanelBytes further on.
TYPED_TEST(Swizzle, PanelsRepeat) {
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
