// core/tile_scheduler.h: rows of several heads in one tile of a Hopper kernel.
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <utility>

#include "core/tile_scheduler.h"

namespace flashcore::core {
namespace {

constexpr std::int32_t kMostRows = 3 * kQTileRows;

TEST(PackGqa, HaveEachQueryOnce) {
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

// What one copy brings: a piece's rows are head after head, as a box of the tensor map is.
TEST(PackGqa, LieInAPieceOneAfterTheOther) {
  for (std::int32_t log2 = 0; 1 << log2 <= kMaxHeadsInTile; ++log2) {
    const PackGqa heads{log2};
    for (std::int32_t row = 0; row < kMostRows; ++row) {
      const std::int32_t piece = row / kQTileRows, within = row % kQTileRows;
      EXPECT_EQ(heads.head(row), within / heads.queries());
      EXPECT_EQ(heads.query(row), piece * heads.queries() + within % heads.queries());
    }
  }
}

// A thread has rows r and r + 8 of its warp's 16, and takes them to be of one head.
TEST(PackGqa, LeaveAWarpOneHead) {
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
