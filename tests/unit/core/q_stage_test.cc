// core/sm90_traits.h: the shared-memory slots and barriers of the Q tiles of an sm90 CTA.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "core/sm90_traits.h"

namespace flashcore::core {
namespace {

constexpr int kWorkTiles = 50;  // of one CTA

/// Walks the Q tiles in load order. Each Q tile takes the next slot and waits for the release of
/// the Q tile in it. Each warpgroup sees every phase of its barriers.
template <int kConsumers, int kSlots, int kTogether>
void expect_slots_in_order() {
  using Stage = QStage<kConsumers, kSlots, kTogether>;
  SCOPED_TRACE(testing::Message() << kConsumers << " warpgroups, " << kSlots << " slots, "
                                  << kTogether << " Q tiles per barrier");
  std::map<std::pair<int, std::uint32_t>, std::uint32_t> phases_seen;  // (warpgroup, barrier)
  std::array<std::uint32_t, Stage::kBarriers> filled{};
  std::map<std::uint32_t, Stage> in_slot;
  int q_tile = 0;
  for (std::uint32_t tile = 0; tile < kWorkTiles; ++tile) {
    for (int group = 0; group < kConsumers; ++group, ++q_tile) {
      SCOPED_TRACE(testing::Message() << "work tile " << tile << ", warpgroup " << group);
      const Stage at{tile, group};
      EXPECT_EQ(at.slot(), static_cast<std::uint32_t>(q_tile % kSlots));
      ASSERT_LT(at.stage(), static_cast<std::uint32_t>(Stage::kBarriers));
      EXPECT_EQ(at.round(), (phases_seen[{group, at.stage()}]++));
      EXPECT_EQ(at.round(), filled[at.stage()]);
      if (q_tile % kTogether == kTogether - 1) ++filled[at.stage()];
      const auto previous = in_slot.find(at.slot());
      if (previous == in_slot.end()) {
        EXPECT_EQ(at.emptied().round(), 0u);
      } else {
        EXPECT_EQ(at.emptied().stage(), previous->second.stage());
        EXPECT_EQ(at.emptied().round(), previous->second.round() + 1);
      }
      in_slot.insert_or_assign(at.slot(), at);
    }
  }
}

TEST(QStage, TakesSlotsInOrder) {
  expect_slots_in_order<1, 1, 1>();
  expect_slots_in_order<1, 2, 1>();
  expect_slots_in_order<2, 2, 1>();
  expect_slots_in_order<2, 2, 2>();
  expect_slots_in_order<2, 3, 1>();
  expect_slots_in_order<2, 4, 2>();
  expect_slots_in_order<3, 3, 1>();
  expect_slots_in_order<3, 5, 1>();
  expect_slots_in_order<3, 6, 3>();
}

// With fewer slots than two work tiles need, a Q tile waits for at most one Q tile of the previous
// work tile. So the producer never waits for a Q tile that it loads later.
TEST(QStage, WaitsForThePreviousWorkTileOnly) {
  for (std::uint32_t tile = 2; tile < kWorkTiles; ++tile) {
    for (int group = 0; group < 2; ++group) {
      const QStage<2, 3, 1> at{tile, group};
      std::set<std::uint32_t> slots_of_tile;
      for (int other = 0; other < 2; ++other) {
        slots_of_tile.insert(QStage<2, 3, 1>{tile, other}.slot());
      }
      EXPECT_EQ(slots_of_tile.size(), 2u);
      // The first Q tile takes the free slot. The second one takes the slot of the first Q tile of
      // the previous work tile.
      const bool in_use = at.slot() == QStage<2, 3, 1>{tile - 1, 0}.slot() ||
                          at.slot() == QStage<2, 3, 1>{tile - 1, 1}.slot();
      EXPECT_EQ(in_use, group == 1);
      if (group == 1) {
        EXPECT_EQ(at.slot(), (QStage<2, 3, 1>{tile - 1, 0}.slot()));
      }
    }
  }
}

TEST(QStage, CountIsTheLargestThatFits) {
  const auto stages = [](const Sm90Traits& shape) {
    return std::array{shape.q_stages(), shape.q_tiles_per_stage()};
  };
  EXPECT_EQ(stages({64, 192, 128, 4}), (std::array{6, 3}));
  EXPECT_EQ(stages({64, 64, 128, 4}), (std::array{2, 1}));
  EXPECT_EQ(stages({128, 128, 128, 2}), (std::array{4, 2}));
  EXPECT_EQ(stages({128, 128, 160, 2}), (std::array{4, 2}));
  EXPECT_EQ(stages({128, 128, 176, 2}), (std::array{3, 1}));
  EXPECT_EQ(stages({256, 128, 64, 2}), (std::array{3, 1}));
  EXPECT_EQ(stages({192, 128, 112, 2}), (std::array{2, 1}));
  EXPECT_EQ(stages({256, 128, 128, 2, 1}), (std::array{2, 2}));
  // All of them fit, and one more does not.
  for (int tile_k = 16; tile_k <= 256; tile_k += 16) {
    for (const int head_dim : {64, 96, 128, 192, 256}) {
      const Sm90Traits shape{head_dim, 128, tile_k, 2};
      const int fit = shape.q_stages();
      if (fit < shape.consumers()) continue;  // no such kernel
      const int bytes = fit * shape.tile_bytes(kQTileRows) + shape.kv_bytes();
      EXPECT_LE(bytes, kSm90SharedBytes);
      if (fit < 2 * shape.consumers()) {
        EXPECT_GT(bytes + shape.tile_bytes(kQTileRows), kSm90SharedBytes - 2048);
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::core
