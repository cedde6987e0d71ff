// core/tile_scheduler.h: PackGQA puts rows of several heads into one tile of an sm90 kernel.
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <utility>

#include "core/tile_scheduler.h"

namespace flashcore::core {
namespace {

constexpr std::int32_t kMostRows = 3 * kQTileRows;

TEST(PackGqa, MapsEachQueryOnce) {
  for (std::int32_t log2 = 0; 1 << log2 <= kMaxHeadsInTile; ++log2) {
    const PackGqa heads{log2};
    SCOPED_TRACE(testing::Message() << (1 << log2) << " heads");
    for (std::int32_t rows = kQTileRows; rows <= kMostRows; rows += kQTileRows) {
      std::set<std::pair<std::int32_t, std::int32_t>> seen;
      for (std::int32_t row = 0; row < rows; ++row) {
        EXPECT_LT(heads.head(row), 1 << log2);
        EXPECT_LT(heads.query(row), rows >> log2);
        seen.insert({heads.head(row), heads.query(row)});
      }
      EXPECT_EQ(seen.size(), static_cast<std::size_t>(rows));
    }
  }
}

// One TMA copy loads a 64-row Q tile. Its rows are ordered by head, like a box of the tensor map.
TEST(PackGqa, OrdersRowsOfAQTileByHead) {
  for (std::int32_t log2 = 0; 1 << log2 <= kMaxHeadsInTile; ++log2) {
    const PackGqa heads{log2};
    for (std::int32_t row = 0; row < kMostRows; ++row) {
      const std::int32_t q_tile = row / kQTileRows, within = row % kQTileRows;
      EXPECT_EQ(heads.head(row), within / heads.queries());
      EXPECT_EQ(heads.query(row), q_tile * heads.queries() + within % heads.queries());
    }
  }
}

// A thread holds rows r and r + 8 of the 16 rows of its warp and assumes that both have one head.
TEST(PackGqa, GivesAWarpOneHead) {
  for (std::int32_t log2 = 0; 1 << log2 <= kMaxHeadsInTile; ++log2) {
    const PackGqa heads{log2};
    for (std::int32_t row = 0; row < kMostRows; ++row) {
      const std::int32_t first = row / kWarpRows * kWarpRows;
      EXPECT_EQ(heads.head(row), heads.head(first));
      EXPECT_EQ(heads.query(row), heads.query(first) + row - first);
    }
  }
}

}  // namespace
}  // namespace flashcore::core
