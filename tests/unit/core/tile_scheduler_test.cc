// core/tile_scheduler.h: the order of a Hopper kernel's work tiles.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/tile_scheduler.h"
#include "verify/inputs/random.h"

namespace flashcore::core {
namespace {

struct Sizes {
  std::int32_t batch, groups, group, q_tiles, last_items;

  std::int32_t q_heads() const { return groups * group; }
  std::int32_t group_items() const { return group * q_tiles; }
  std::int32_t items() const { return batch * groups * group_items(); }
};

std::string to_string(const Sizes& s) {
  return "batch " + std::to_string(s.batch) + ", heads " + std::to_string(s.q_heads()) +
         ", group " + std::to_string(s.group) + ", q_tiles " + std::to_string(s.q_tiles) +
         ", last_items " + std::to_string(s.last_items);
}

std::vector<TileCoord> all_items(const TileScheduler& order) {
  std::vector<TileCoord> items;
  for (std::int32_t i = 0; i < order.tiles; ++i) items.push_back(coord_of(order, i));
  return items;
}

void expect_each_once(const Sizes& sizes, const std::vector<TileCoord>& items) {
  EXPECT_EQ(items.size(), static_cast<std::size_t>(sizes.items()));
  std::set<std::tuple<std::int32_t, std::int32_t, std::int32_t>> seen;
  for (const TileCoord& item : items) {
    EXPECT_TRUE(item.batch >= 0 && item.batch < sizes.batch && item.head >= 0 &&
                item.head < sizes.q_heads() && item.q_tile >= 0 && item.q_tile < sizes.q_tiles)
        << "batch " << item.batch << " head " << item.head << " tile " << item.q_tile;
    seen.insert({item.batch, item.head, item.q_tile});
  }
  EXPECT_EQ(seen.size(), items.size()) << "an item comes twice";
}

/// The number of the K and V that an item reads.
std::int32_t group_of(const Sizes& sizes, const TileCoord& item) {
  return (item.batch * sizes.q_heads() + item.head) / sizes.group;
}

void expect_order(const Sizes& sizes, const std::vector<TileCoord>& items) {
  // Whole groups are left for the last part: enough for what was asked, or all there are.
  const std::int32_t wanted = std::min(sizes.last_items, sizes.items());
  const std::int32_t last_groups = (wanted + sizes.group_items() - 1) / sizes.group_items();
  const auto last = static_cast<std::size_t>(sizes.items() - last_groups * sizes.group_items());
  for (std::size_t i = 0; i < items.size(); ++i) {
    SCOPED_TRACE("item " + std::to_string(i));
    const TileCoord& item = items[i];
    const std::int32_t group = group_of(sizes, item);
    if (i < last) {
      EXPECT_EQ(group, static_cast<std::int32_t>(i) / sizes.group_items());
    }
    if (i == 0) continue;
    const TileCoord& before = items[i - 1];
    const bool same_part = i < last ? group == group_of(sizes, before) : i > last;
    if (same_part) {
      EXPECT_LE(item.q_tile, before.q_tile);
    }
    // The heads that share K and V, at the same tile of queries, are neighbours.
    if (i % static_cast<std::size_t>(sizes.group) != 0) {
      EXPECT_EQ(group, group_of(sizes, before));
      EXPECT_EQ(item.q_tile, before.q_tile);
    }
  }
}

void check(const Sizes& sizes) {
  SCOPED_TRACE(to_string(sizes));
  const std::vector<TileCoord> items = all_items(make_tile_scheduler(
      sizes.batch, sizes.q_heads(), sizes.group, sizes.q_tiles, sizes.last_items));
  expect_each_once(sizes, items);
  expect_order(sizes, items);
}

constexpr std::int32_t kLastItems[] = {0, 1, 528, 1 << 30};

TEST(TileScheduler, VisitsEveryItemOnceLongOnesFirst) {
  verify::Random random(3);
  const auto draw = [&](std::int64_t most) {
    return static_cast<std::int32_t>(random.between(1, most));
  };
  for (int round = 0; round < 300; ++round) {
    Sizes sizes{draw(5), draw(8), draw(8), draw(40), 0};
    for (const std::int32_t last_items : kLastItems) {
      sizes.last_items = last_items;
      check(sizes);
    }
    sizes.last_items = draw(sizes.items() + 1);
    check(sizes);
    if (HasFailure()) return;
  }
}

TEST(TileScheduler, OfOneItemIsThatItem) {
  for (const std::int32_t last_items : kLastItems) check({1, 1, 1, 1, last_items});
}

TEST(TileScheduler, OfNothingIsEmpty) {
  for (const std::int32_t last_items : kLastItems) {
    EXPECT_EQ(make_tile_scheduler(0, 8, 2, 3, last_items).tiles, 0);
    EXPECT_EQ(make_tile_scheduler(2, 8, 2, 0, last_items).tiles, 0);
  }
}

// Items at the end that are cut into parts: every other item is one piece of work, and so is every
// part, in their order.
TEST(WorkPieces, AreWholeItemsAndThenParts) {
  for (const std::int32_t items : {1, 2, 5, 132, 137}) {
    const TileScheduler order = make_tile_scheduler(1, items, 1, 1, 0);
    for (std::int32_t cut = 0; cut <= std::min(items, 6); ++cut) {
      for (const std::int32_t parts : {1, 2, 3, 16}) {
        const TailSplit tail{items - cut, 1, make_fast_divmod(parts)};
        SCOPED_TRACE(testing::Message() << cut << " of " << items << " in " << parts);
        std::int32_t index = 0;
        for (std::int32_t item = 0; item < items - cut; ++item, ++index) {
          EXPECT_EQ(scheduled_tile(tail, index).tile, item);
          EXPECT_EQ(scheduled_tile(tail, index).split, -1);
        }
        for (std::int32_t item = items - cut; item < items; ++item) {
          for (std::int32_t part = 0; part < parts; ++part, ++index) {
            EXPECT_EQ(scheduled_tile(tail, index).tile, item);
            EXPECT_EQ(scheduled_tile(tail, index).split, part);
          }
        }
        EXPECT_EQ(num_scheduled(order, tail), index);
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::core
