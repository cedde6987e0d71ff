// core/tile_scheduler.h: the order of the work tiles of an sm90 kernel.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/tile_scheduler.h"
#include "support/rounds.h"
#include "verify/inputs/random.h"

namespace flashcore::core {
namespace {

struct Sizes {
  std::int32_t batch, groups, group, q_tiles, last_tiles;

  std::int32_t q_heads() const { return groups * group; }
  std::int32_t group_tiles() const { return group * q_tiles; }
  std::int32_t tiles() const { return batch * groups * group_tiles(); }
};

std::string to_string(const Sizes& s) {
  return "batch " + std::to_string(s.batch) + ", heads " + std::to_string(s.q_heads()) +
         ", group " + std::to_string(s.group) + ", q_tiles " + std::to_string(s.q_tiles) +
         ", last_tiles " + std::to_string(s.last_tiles);
}

std::vector<TileCoord> all_tiles(const TileScheduler& order) {
  std::vector<TileCoord> tiles;
  for (std::int32_t i = 0; i < order.tiles; ++i) tiles.push_back(coord_of(order, i));
  return tiles;
}

void expect_each_once(const Sizes& sizes, const std::vector<TileCoord>& tiles) {
  EXPECT_EQ(tiles.size(), static_cast<std::size_t>(sizes.tiles()));
  std::set<std::tuple<std::int32_t, std::int32_t, std::int32_t>> seen;
  for (const TileCoord& tile : tiles) {
    EXPECT_TRUE(tile.batch >= 0 && tile.batch < sizes.batch && tile.head >= 0 &&
                tile.head < sizes.q_heads() && tile.q_tile >= 0 && tile.q_tile < sizes.q_tiles)
        << "batch " << tile.batch << " head " << tile.head << " tile " << tile.q_tile;
    seen.insert({tile.batch, tile.head, tile.q_tile});
  }
  EXPECT_EQ(seen.size(), tiles.size()) << "a tile occurs twice";
}

/// Index of the (batch, KV head) that a tile reads.
std::int32_t group_of(const Sizes& sizes, const TileCoord& tile) {
  return (tile.batch * sizes.q_heads() + tile.head) / sizes.group;
}

void expect_order(const Sizes& sizes, const std::vector<TileCoord>& tiles) {
  // The last part consists of whole groups: at least last_tiles tiles, or all of them.
  const std::int32_t wanted = std::min(sizes.last_tiles, sizes.tiles());
  const std::int32_t last_groups = (wanted + sizes.group_tiles() - 1) / sizes.group_tiles();
  const auto last = static_cast<std::size_t>(sizes.tiles() - last_groups * sizes.group_tiles());
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    SCOPED_TRACE("tile " + std::to_string(i));
    const TileCoord& tile = tiles[i];
    const std::int32_t group = group_of(sizes, tile);
    if (i < last) {
      EXPECT_EQ(group, static_cast<std::int32_t>(i) / sizes.group_tiles());
    }
    if (i == 0) continue;
    const TileCoord& before = tiles[i - 1];
    const bool same_part = i < last ? group == group_of(sizes, before) : i > last;
    if (same_part) {
      EXPECT_LE(tile.q_tile, before.q_tile);
    }
    // Heads that share K and V are adjacent for each query tile.
    if (i % static_cast<std::size_t>(sizes.group) != 0) {
      EXPECT_EQ(group, group_of(sizes, before));
      EXPECT_EQ(tile.q_tile, before.q_tile);
    }
  }
}

void check(const Sizes& sizes) {
  SCOPED_TRACE(to_string(sizes));
  const std::vector<TileCoord> tiles = all_tiles(make_tile_scheduler(
      sizes.batch, sizes.q_heads(), sizes.group, sizes.q_tiles, sizes.last_tiles));
  expect_each_once(sizes, tiles);
  expect_order(sizes, tiles);
}

constexpr std::int32_t kLastTiles[] = {0, 1, 528, 1 << 30};

TEST(TileScheduler, VisitsEveryTileOnceLongestFirst) {
  verify::Random random(3);
  const auto draw = [&](std::int64_t most) {
    return static_cast<std::int32_t>(random.between(1, most));
  };
  for (int round = 0; round < test::rounds(300); ++round) {
    Sizes sizes{draw(5), draw(8), draw(8), draw(40), 0};
    for (const std::int32_t last_tiles : kLastTiles) {
      sizes.last_tiles = last_tiles;
      check(sizes);
    }
    sizes.last_tiles = draw(sizes.tiles() + 1);
    check(sizes);
    if (HasFailure()) return;
  }
}

TEST(TileScheduler, OneTileIsVisited) {
  for (const std::int32_t last_tiles : kLastTiles) check({1, 1, 1, 1, last_tiles});
}

TEST(TileScheduler, NoTilesGiveAnEmptySchedule) {
  for (const std::int32_t last_tiles : kLastTiles) {
    EXPECT_EQ(make_tile_scheduler(0, 8, 2, 3, last_tiles).tiles, 0);
    EXPECT_EQ(make_tile_scheduler(2, 8, 2, 0, last_tiles).tiles, 0);
  }
}

// Tail tiles are split along the keys. The scheduler returns whole tiles first, then every split of
// every tail tile, in order.
TEST(TailSplit, WholeTilesComeBeforeTailSplits) {
  for (const std::int32_t tiles : {1, 2, 5, 132, 137}) {
    const TileScheduler order = make_tile_scheduler(1, tiles, 1, 1, 0);
    for (std::int32_t tail_tiles = 0; tail_tiles <= std::min(tiles, 6); ++tail_tiles) {
      for (const std::int32_t splits : {1, 2, 3, 16}) {
        const TailSplit tail{tiles - tail_tiles, 1, make_fast_divmod(splits)};
        SCOPED_TRACE(testing::Message() << tail_tiles << " of " << tiles << " in " << splits);
        std::int32_t index = 0;
        for (std::int32_t tile = 0; tile < tiles - tail_tiles; ++tile, ++index) {
          EXPECT_EQ(scheduled_tile(tail, index).tile, tile);
          EXPECT_EQ(scheduled_tile(tail, index).split, -1);
        }
        for (std::int32_t tile = tiles - tail_tiles; tile < tiles; ++tile) {
          for (std::int32_t split = 0; split < splits; ++split, ++index) {
            EXPECT_EQ(scheduled_tile(tail, index).tile, tile);
            EXPECT_EQ(scheduled_tile(tail, index).split, split);
          }
        }
        EXPECT_EQ(num_scheduled(order, tail), index);
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::core
