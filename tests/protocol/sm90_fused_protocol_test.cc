// The synchronization of the fused sm90 kernels for gradients, as a model on the CPU, inside a CTA
// and between CTAs (see sm90_protocol_test.cc).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "sm90_fused_cta.h"
#include "support/rounds.h"

namespace flashcore::protocol {
namespace {

core::Mask draw_mask(verify::Random& random, std::int32_t q_len, std::int32_t kv_len) {
  const std::int64_t left = random.chance(0.3) ? random.between(0, 200) : -1;
  const std::int64_t right = random.chance(0.5) ? random.between(0, 100) : -1;
  const std::int64_t diagonal = random.chance(0.7) ? kv_len - q_len : random.between(-400, 400);
  return {diagonal, left, right, kv_len, {}};
}

core::BwdSteps work_tile(const FusedSequence& sequence, std::int32_t key_tile, std::int32_t heads) {
  core::BwdSteps work{};
  const std::int32_t first = key_tile * core::kBwdTileRows;
  work.output = core::FusedSteps::kOutput;
  work.rows = std::min(core::kBwdTileRows, sequence.mask.kv_len - first);
  work.heads = heads;
  if (work.rows > 0) {
    core::find_bwd_tiles(work, core::transposed(sequence.mask, sequence.q_len), first,
                         core::kFusedStepRows);
  }
  return work;
}

/// Sequences of unequal lengths; causal masks, windows, groups of heads, whole and partial
/// sections; CTAs of which some start when others have ended.
FusedLaunch draw_launch(std::uint64_t seed) {
  verify::Random random(seed);
  FusedLaunch launch{};
  launch.dirty_tail = random.chance(0.5);
  launch.num_ctas = static_cast<std::int32_t>(random.between(1, 4));
  launch.resident = static_cast<std::int32_t>(random.between(1, launch.num_ctas));
  launch.kv_heads =
      static_cast<std::int32_t>(random.chance(0.3) ? random.between(7, 10) : random.between(1, 3));
  launch.group = static_cast<std::int32_t>(random.between(1, 3));
  const std::int64_t longest = launch.kv_heads > 3 ? 300 : 600;
  std::int32_t keys = 0;
  for (std::int64_t i = random.between(1, 2); i > 0; --i) {
    const auto q_len = static_cast<std::int32_t>(random.between(1, longest));
    const auto kv_len = static_cast<std::int32_t>(random.between(1, longest));
    keys = std::max(keys, kv_len);
    launch.sequences.push_back({draw_mask(random, q_len, kv_len), q_len});
  }
  const auto batch = static_cast<std::int32_t>(launch.sequences.size());
  launch.order = core::make_fused_order(batch, launch.kv_heads,
                                        (keys + core::kBwdTileRows - 1) / core::kBwdTileRows,
                                        static_cast<std::int32_t>(random.between(1, 8)));
  for (std::int32_t ticket = 0; ticket < launch.order.tiles; ++ticket) {
    const core::FusedCoord at = launch.coord(ticket);
    launch.tiles.push_back(
        work_tile(launch.sequences[static_cast<std::size_t>(at.batch)], at.key_tile, launch.group));
  }
  return launch;
}

/// Every dQ tile has had as many additions as work tiles have steps with it.
void expect_all_added(const FusedLaunch& launch) {
  std::map<DqTile, std::uint32_t> want;
  for (std::int32_t ticket = 0; ticket < launch.order.tiles; ++ticket) {
    const core::BwdSteps& work = launch.tiles[static_cast<std::size_t>(ticket)];
    const core::FusedCoord at = launch.coord(ticket);
    for (std::int32_t i = 0; i < work.steps(); ++i) {
      ++want[{at.batch, at.head * launch.group + i % work.heads, work.first_tile + i / work.heads}];
    }
  }
  EXPECT_EQ(launch.turns, want);
}

/// The violation that a random launch shows, or an empty text.
std::string run_random(std::uint64_t seed, FusedFault fault) {
  FusedLaunch launch = draw_launch(seed);
  try {
    run_fused_model(launch, fault, seed);
  } catch (const Violation& violation) {
    return violation.message + "; seed " + std::to_string(seed);
  }
  expect_all_added(launch);
  return "";
}

/// Expects that one of a hundred launches shows the fault. Prints the violation.
void expect_found(FusedFault fault) {
  std::string found;
  for (std::uint64_t seed = 0; seed < 100 && found.empty(); ++seed) {
    found = run_random(seed, fault);
  }
  EXPECT_NE(found, "");
  std::printf("%s\n", found.c_str());
}

TEST(Sm90FusedProtocol, EveryInterleavingEndsWithEveryTileAddedOnce) {
  const int problems = test::rounds(75);
  for (int seed = 0; seed < problems; ++seed) {
    ASSERT_EQ(run_random(static_cast<std::uint64_t>(seed), FusedFault::none), "");
  }
}

TEST(Sm90FusedProtocol, FindsAMissingArrival) { expect_found(FusedFault::arrival_missing); }
TEST(Sm90FusedProtocol, FindsAnIgnoredTurn) { expect_found(FusedFault::turn_ignored); }
TEST(Sm90FusedProtocol, FindsDzReadEarly) { expect_found(FusedFault::dz_not_awaited); }
TEST(Sm90FusedProtocol, FindsDqStagedEarly) { expect_found(FusedFault::dq_not_awaited); }

/// The key tiles with a step for a dQ tile are adjacent, and turns count them.
TEST(Sm90FusedProtocol, TurnsCountTheKeyTilesOfADqTile) {
  verify::Random random(1);
  for (int i = 0; i < 3000; ++i) {
    const auto q_len = static_cast<std::int32_t>(random.between(1, 700));
    const auto kv_len = static_cast<std::int32_t>(random.between(1, 700));
    const FusedSequence sequence{draw_mask(random, q_len, kv_len), q_len};
    const std::int32_t q_tiles = (q_len + core::kFusedStepRows - 1) / core::kFusedStepRows;
    std::vector<std::uint32_t> additions(static_cast<std::size_t>(q_tiles));
    for (std::int32_t n = 0; n * core::kBwdTileRows < kv_len; ++n) {
      const core::BwdSteps work = work_tile(sequence, n, 1);
      for (std::int32_t m = work.first_tile; m < work.first_tile + work.tiles; ++m) {
        ASSERT_EQ(core::turn_of(sequence.mask, q_len, m, n),
                  additions[static_cast<std::size_t>(m)]++);
      }
    }
    for (std::int32_t m = 0; m < q_tiles; ++m) {
      ASSERT_EQ(core::keys_of_dq_tile(sequence.mask, q_len, m).empty(),
                additions[static_cast<std::size_t>(m)] == 0);
    }
  }
}

/// Tickets visit every work tile once; inside a head, key tiles ascend.
TEST(Sm90FusedProtocol, TicketsAscendInsideAHead) {
  for (std::int32_t heads = 1; heads < 40; ++heads) {
    for (std::int32_t batch = 1; batch < 4; ++batch) {
      const core::FusedOrder order = core::make_fused_order(batch, heads, 5, 1 + heads % 8);
      ASSERT_EQ(order.tiles, batch * heads * 5);
      std::vector<std::int32_t> next(static_cast<std::size_t>(batch * heads));
      for (std::int32_t ticket = 0; ticket < order.tiles; ++ticket) {
        const core::FusedCoord at = core::coord_of(order, ticket);
        ASSERT_EQ(at.key_tile, next[static_cast<std::size_t>(at.batch * heads + at.head)]++);
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::protocol
