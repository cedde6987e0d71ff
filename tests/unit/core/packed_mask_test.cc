#include "core/packed_mask.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "core/mma_layout.h"

namespace flashcore::core {
namespace {

TEST(PackedMask, ALaneFindsTheBitsOfItsAccumulators) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int n = 0; n < kMaskBlockKeys / 8; ++n) {
      for (int i = 0; i < 2; ++i) {
        const std::int32_t key = 3 * kMaskBlockKeys + 8 * n + mma_c(lane, i).column;
        EXPECT_EQ(mask_key(3, lane % 4, 2 * n + i), key);
      }
    }
  }
}

TEST(PackedMask, EveryKeyHasABitOfItsOwn) {
  std::set<std::int32_t> keys;
  for (std::int32_t word = 0; word < 16; ++word) {
    for (int bit = 0; bit < 32; ++bit) {
      EXPECT_TRUE(keys.insert(mask_key(word / 4, word % 4, bit)).second) << word << ' ' << bit;
    }
  }
  EXPECT_EQ(*keys.begin(), 0);
  EXPECT_EQ(*keys.rbegin(), 4 * kMaskBlockKeys - 1);
}

TEST(PackedMask, BroadcastDimsHaveExtentOne) {
  const PackedMask all = packed_mask_of(100, 100, 100, 3, 5, 33, 129);
  EXPECT_EQ(all.word_count(), (3 * 5 * 33 + kMaskPaddingRows) * 2 * 4);
  EXPECT_EQ(all.range_count(), 3 * 5 * 3);
  EXPECT_EQ(all.row_offset(2, 4, 32), (3 * 5 * 33 - 1) * 2 * 4);
  const PackedMask keys = packed_mask_of(100, 0, 0, 3, 5, 33, 129);
  EXPECT_EQ(keys.word_count(), 3 * 2 * 4);
  EXPECT_EQ(keys.row_offset(2, 4, 32), 2 * 2 * 4);
  EXPECT_EQ(packed_mask_of(0, 0, 0, 3, 5, 33, 0).word_count(), 4);
}

TEST(PackedMask, TheBlocksOfQueriesContainThoseOfAllTheirGroups) {
  PackedMask mask = packed_mask_of(1, 0, 1, 2, 4, 50, 1000);
  std::vector<KeyRange> ranges = {{0, 128},   {128, 256}, {1024, 0}, {256, 512},
                                  {512, 640}, {1024, 0},  {0, 256},  {640, 1024}};
  ASSERT_EQ(mask.range_count(), static_cast<std::int64_t>(ranges.size()));
  mask.ranges = ranges.data();
  const auto blocks = [&](std::int32_t b, std::int32_t first, std::int32_t count) {
    const KeyRange range = visible_blocks(mask, b, 3, first, count);
    return std::pair(range.begin, range.end);
  };
  EXPECT_EQ(blocks(0, 0, 16), std::pair(0, 128));
  EXPECT_EQ(blocks(0, 0, 17), std::pair(0, 256));
  EXPECT_EQ(blocks(0, 32, 16), std::pair(1024, 0));
  EXPECT_EQ(blocks(0, 16, 34), std::pair(128, 512));
  EXPECT_EQ(blocks(1, 0, 50), std::pair(0, 1024));
}

}  // namespace
}  // namespace flashcore::core
