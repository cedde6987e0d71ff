// core/sm90_traits.h: where a Hopper kernel's block keeps the queries of its items.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "core/sm90_traits.h"

namespace flashcore::core {
namespace {

constexpr int kBlockItems = 50;

/// Pieces in the order in which they are loaded, whole items apart: each takes the next place, and
/// waits for the piece that was there before; each warpgroup meets every phase of its barriers.
template <int kConsumers, int kPlaces, int kTogether>
void expect_pieces_to_go_round() {
  using Place = QStage<kConsumers, kPlaces, kTogether>;
  SCOPED_TRACE(testing::Message() << kConsumers << " warpgroups, " << kPlaces << " places, "
                                  << kTogether << " pieces together");
  std::map<std::pair<int, std::uint32_t>, std::uint32_t> met;  // of a warpgroup at a barrier
  std::array<std::uint32_t, Place::kBarriers> filled{};
  std::map<std::uint32_t, Place> in_place;
  int piece = 0;
  for (std::uint32_t item = 0; item < kBlockItems; ++item) {
    for (int group = 0; group < kConsumers; ++group, ++piece) {
      SCOPED_TRACE(testing::Message() << "item " << item << ", group " << group);
      const Place at{item, group};
      EXPECT_EQ(at.slot(), static_cast<std::uint32_t>(piece % kPlaces));
      ASSERT_LT(at.stage(), static_cast<std::uint32_t>(Place::kBarriers));
      EXPECT_EQ(at.round(), (met[{group, at.stage()}]++));
      EXPECT_EQ(at.round(), filled[at.stage()]);
      if (piece % kTogether == kTogether - 1) ++filled[at.stage()];
      const auto before = in_place.find(at.slot());
      if (before == in_place.end()) {
        EXPECT_EQ(at.emptied().round(), 0u);
      } else {
        EXPECT_EQ(at.emptied().stage(), before->second.stage());
        EXPECT_EQ(at.emptied().round(), before->second.round() + 1);
      }
      in_place.insert_or_assign(at.slot(), at);
    }
  }
}

TEST(QueryPlaces, GoRound) {
  expect_pieces_to_go_round<1, 1, 1>();
  expect_pieces_to_go_round<1, 2, 1>();
  expect_pieces_to_go_round<2, 2, 1>();
  expect_pieces_to_go_round<2, 2, 2>();
  expect_pieces_to_go_round<2, 3, 1>();
  expect_pieces_to_go_round<2, 4, 2>();
  expect_pieces_to_go_round<3, 3, 1>();
  expect_pieces_to_go_round<3, 5, 1>();
  expect_pieces_to_go_round<3, 6, 3>();
}

// With fewer places than two items need, a piece waits for one of the item before at most: the
// loader asks for nothing that has to wait for what it loads later.
TEST(QueryPlaces, AreFreeInTime) {
  for (std::uint32_t item = 2; item < kBlockItems; ++item) {
    for (int group = 0; group < 2; ++group) {
      const QStage<2, 3, 1> at{item, group};
      std::set<std::uint32_t> of_this_item;
      for (int other = 0; other < 2; ++other) {
        of_this_item.insert(QStage<2, 3, 1>{item, other}.slot());
      }
      EXPECT_EQ(of_this_item.size(), 2u);
      // The first piece takes the place that the item before left empty, the second one that of the
      // item before's first.
      const bool in_use = at.slot() == QStage<2, 3, 1>{item - 1, 0}.slot() ||
                          at.slot() == QStage<2, 3, 1>{item - 1, 1}.slot();
      EXPECT_EQ(in_use, group == 1);
      if (group == 1) {
        EXPECT_EQ(at.slot(), (QStage<2, 3, 1>{item - 1, 0}.slot()));
      }
    }
  }
}

TEST(QueryPlaces, AreAsManyAsFit) {
  const auto places = [](const Sm90Traits& shape) {
    return std::array{shape.q_stages(), shape.q_tiles_per_stage()};
  };
  EXPECT_EQ(places({64, 192, 128, 4}), (std::array{6, 3}));
  EXPECT_EQ(places({64, 64, 128, 4}), (std::array{2, 1}));
  EXPECT_EQ(places({128, 128, 128, 2}), (std::array{4, 2}));
  EXPECT_EQ(places({128, 128, 160, 2}), (std::array{4, 2}));
  EXPECT_EQ(places({128, 128, 176, 2}), (std::array{3, 1}));
  EXPECT_EQ(places({256, 128, 64, 2}), (std::array{3, 1}));
  EXPECT_EQ(places({192, 128, 112, 2}), (std::array{2, 1}));
  EXPECT_EQ(places({256, 128, 128, 2, 1}), (std::array{2, 2}));
  // As many as fit, and no more.
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
