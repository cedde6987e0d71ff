// core/mma_layout.h: all coordinates of all fragments, the ldmatrix addresses that load them, and
// the swizzled tiles of all shapes in use.
#include "core/mma_layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
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

/// A tile as values: one test body for all shapes compiles five times faster than a typed test.
struct TileOfShape {
  int rows, columns, chunks, panels, panel_columns, panel_chunks, panel_bytes;
  int (*offset)(int row, int chunk);
  unsigned (*advance_k)(unsigned address, int n);
  unsigned (*advance_rows8)(unsigned address, int n);
};

template <int kRows, int kColumns>
TileOfShape shape() {
  using Tile = SwizzledTile<kRows, kColumns>;
  static_assert(Tile::kElements == kRows * kColumns);
  return {kRows,
          kColumns,
          kColumns / 8,
          Tile::kPanels,
          Tile::kPanelColumns,
          Tile::kPanelChunks,
          Tile::kPanelBytes,
          [](int row, int chunk) { return Tile::offset(row, chunk); },
          [](unsigned address, int n) { return Tile::advance_k(address, n); },
          [](unsigned address, int n) { return Tile::advance_rows8(address, n); }};
}

class Swizzle : public testing::TestWithParam<TileOfShape> {
 protected:
  /// The 32 banks form eight groups of 16 bytes. Returns the group of an address.
  static int banks(std::int64_t address) { return static_cast<int>(address / 16 % 8); }

  const TileOfShape& tile = GetParam();
};

const TileOfShape kShapes[] = {
    shape<8, 64>(),   shape<8, 128>(),   shape<16, 32>(),   shape<16, 64>(),   shape<16, 96>(),
    shape<16, 128>(), shape<16, 160>(),  shape<16, 192>(),  shape<16, 256>(),  shape<32, 64>(),
    shape<32, 96>(),  shape<32, 128>(),  shape<32, 192>(),  shape<32, 256>(),  shape<48, 64>(),
    shape<48, 96>(),  shape<48, 128>(),  shape<64, 32>(),   shape<64, 64>(),   shape<64, 96>(),
    shape<64, 128>(), shape<64, 192>(),  shape<64, 224>(),  shape<64, 256>(),  shape<80, 128>(),
    shape<96, 64>(),  shape<96, 128>(),  shape<112, 64>(),  shape<128, 32>(),  shape<128, 64>(),
    shape<128, 96>(), shape<128, 128>(), shape<128, 192>(), shape<128, 256>(), shape<192, 64>(),
    shape<256, 64>()};

INSTANTIATE_TEST_SUITE_P(Shapes, Swizzle, testing::ValuesIn(kShapes),
                         [](const testing::TestParamInfo<TileOfShape>& one) {
                           return std::to_string(one.param.rows) + "x" +
                                  std::to_string(one.param.columns);
                         });

TEST_P(Swizzle, IsABijectionOntoTheTile) {
  std::set<int> offsets;
  for (int row = 0; row < tile.rows; ++row) {
    for (int chunk = 0; chunk < tile.chunks; ++chunk) {
      const int offset = tile.offset(row, chunk);
      EXPECT_EQ(offset % 16, 0);
      EXPECT_GE(offset, 0);
      EXPECT_LE(offset + 16, 2 * tile.rows * tile.columns);
      EXPECT_TRUE(offsets.insert(offset).second) << "row " << row << " chunk " << chunk;
    }
  }
  EXPECT_EQ(static_cast<int>(offsets.size()) * 8, tile.rows * tile.columns);
}

// ldmatrix reads the eight rows of one matrix in one access.
TEST_P(Swizzle, EightRowsOfAChunkHitEightBankGroups) {
  for (int first = 0; first + 8 <= tile.rows; first += 8) {
    for (int chunk = 0; chunk < tile.chunks; ++chunk) {
      std::set<int> groups;
      for (int row = first; row < first + 8; ++row) {
        groups.insert(banks(tile.offset(row, chunk)));
      }
      EXPECT_EQ(groups.size(), 8u) << "rows from " << first << " chunk " << chunk;
    }
  }
}

// Copies go in the order of panel, row and chunk. Eight lanes write their 16 bytes in one access.
TEST_P(Swizzle, EightAdjacentCopiesHitEightBankGroups) {
  for (int panel = 0; panel < tile.panels; ++panel) {
    for (int index = 0; index < tile.rows * tile.panel_chunks; index += 8) {
      std::set<int> groups;
      for (int lane = index; lane < index + 8; ++lane) {
        groups.insert(banks(tile.offset(lane / tile.panel_chunks,
                                        panel * tile.panel_chunks + lane % tile.panel_chunks)));
      }
      EXPECT_EQ(groups.size(), 8u) << "panel " << panel << " copies from " << index;
    }
  }
}

// advance_k() and advance_rows8() reach every address of a lane from its first one, which may be at
// any row and at chunk 0 or 1, or at chunk 0 to 3 if n is even. The tile may begin at any multiple
// of 128 bytes.
TEST_P(Swizzle, AdvanceReachesEveryOffset) {
  for (const unsigned base : {0u, 128u, 1024u + 384u, 99968u}) {
    for (int row = 0; row < tile.rows; ++row) {
      for (int chunk = 0; chunk < (tile.panel_columns == 64 ? 4 : 2); ++chunk) {
        const unsigned first = base + static_cast<unsigned>(tile.offset(row, chunk));
        for (int n = 0; 2 * n + chunk < tile.chunks; n += chunk < 2 ? 1 : 2) {
          ASSERT_EQ(tile.advance_k(first, n),
                    base + static_cast<unsigned>(tile.offset(row, chunk + 2 * n)))
              << "base " << base << " row " << row << " chunk " << chunk << " advance_k " << n;
        }
        for (int n = 0; row + 8 * n < tile.rows; ++n) {
          const unsigned below = tile.advance_rows8(first, n);
          ASSERT_EQ(below, base + static_cast<unsigned>(tile.offset(row + 8 * n, chunk)))
              << "base " << base << " row " << row << " chunk " << chunk << " advance_rows8 " << n;
          const int last = chunk < 2 ? (tile.chunks - 1 - chunk) / 2 : 0;
          ASSERT_EQ(tile.advance_k(below, last),
                    tile.advance_rows8(tile.advance_k(first, last), n));
        }
      }
    }
  }
}

// A thread keeps one address for all its copies: chunk c of panel p is p * kPanelBytes after chunk
// c of panel 0.
TEST_P(Swizzle, PanelsHaveEqualLayouts) {
  for (int row = 0; row < tile.rows; ++row) {
    for (int chunk = 0; chunk < tile.chunks; ++chunk) {
      EXPECT_EQ(tile.offset(row, chunk), tile.offset(row, chunk % tile.panel_chunks) +
                                             chunk / tile.panel_chunks * tile.panel_bytes);
    }
  }
}

}  // namespace
}  // namespace flashcore::core
