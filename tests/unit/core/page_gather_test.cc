#include "core/page_gather.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace flashcore::core {
namespace {

/// Every row of the tile is copied once for each chunk of a panel, by a lane that gets the page of
/// that row from the lane that has looked it up.
template <int kTileK, int kWarps>
void expect_every_row_once() {
  using Gather = PageGather<kTileK, kWarps>;
  std::set<std::pair<int, int>> copied;
  for (int warp = 0; warp < kWarps; ++warp) {
    for (int copy = 0; copy < Gather::kCopies; ++copy) {
      const int lookup = copy / Gather::kCopiesOfLookup;
      ASSERT_LT(lookup, Gather::kLookups);
      for (int lane = 0; lane < 32; ++lane) {
        const int row = Gather::copied_row(warp, lane, copy);
        const int source = Gather::source_lane(lane, copy);
        ASSERT_GE(source, 0);
        ASSERT_LT(source, 32);
        ASSERT_EQ(Gather::looked_up_row(warp, source, lookup), row);
        const int chunk = lane % Gather::kLanesOfRow;
        ASSERT_TRUE(copied.emplace(row, chunk).second) << row;
      }
    }
  }
  for (int row = 0; row < kTileK; ++row) {
    for (int chunk = 0; chunk < Gather::kLanesOfRow; ++chunk) {
      ASSERT_TRUE(copied.contains({row, chunk})) << row;
    }
  }
}

TEST(PageGather, CopiesEveryRowOnce) {
  expect_every_row_once<64, 3>();
  expect_every_row_once<96, 3>();
  expect_every_row_once<112, 3>();
  expect_every_row_once<128, 3>();
  expect_every_row_once<160, 3>();
  expect_every_row_once<176, 3>();
  expect_every_row_once<208, 3>();
  expect_every_row_once<128, 1>();
}

}  // namespace
}  // namespace flashcore::core
