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

TEST(PackedMask, EveryByteThatIsNotZeroIsABit) {
  constexpr std::uint32_t kBytes[] = {0, 1, 0x7f, 0x80, 0xff};
  for (int i = 0; i < 5 * 5 * 5 * 5; ++i) {
    std::uint32_t bytes = 0, want = 0;
    for (int j = 0, rest = i; j < 4; ++j, rest /= 5) {
      bytes |= kBytes[rest % 5] << (8 * j);
      if (rest % 5 != 0) want |= 1u << j;
    }
    EXPECT_EQ(nonzero_bytes(bytes), want) << bytes;
  }
}

TEST(PackedMask, AWordOfABlockMaskHasTheKeysThatItShows) {
  const std::vector<std::int32_t> blocks = {kVisibleBlock, kHiddenBlock, kMixedBlock + 1, 7};
  std::vector<std::uint32_t> bits(2 * 4 * 2);  // two tiles of 4 queries and 64 keys
  for (std::size_t i = 0; i < bits.size(); ++i)
    bits[i] = 0x9e3779b9u * static_cast<std::uint32_t>(i);
  const BlockMask mask{blocks.data(), bits.data(), {0, 0, 4, 1}, 2, 2, 6};
  for (std::int32_t query = 0; query < 4; ++query) {
    const std::int32_t* row = mask.row(0, 0, query);
    for (std::int32_t key = 0; key < 256; ++key) {
      const std::uint32_t word = mask.word(mask.entry(row, key), query, key);
      EXPECT_EQ((word >> key % 32 & 1u) != 0, mask.shows(row, query, key));
      const std::uint32_t mixed = bits[static_cast<std::size_t>((4 + query) * 2 + key % 64 / 32)];
      EXPECT_EQ(word, key < 64 ? ~0u : key / 64 == 2 ? mixed : 0u) << query << ' ' << key;
    }
  }
}

}  // namespace
}  // namespace flashcore::core
