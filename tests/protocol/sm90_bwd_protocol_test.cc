// The synchronization of the sm90 kernels for gradients, as a model on the CPU (see
// sm90_protocol_test.cc).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "core/seq_info.h"
#include "sm90_bwd_cta.h"
#include "support/rounds.h"

namespace flashcore::protocol {
namespace {

/// Work tiles of a kind for all sequences, over `heads` heads each.
void add_tiles(BwdLaunch& launch, BackwardOutput output, const core::Mask& mask, std::int32_t rows,
               std::int32_t heads, std::int32_t step) {
  for (std::int32_t first = 0; first < rows; first += core::kBwdTileRows) {
    core::BwdSteps work{};
    work.output = output;
    work.rows = std::min(core::kBwdTileRows, rows - first);
    work.heads = heads;
    core::find_bwd_tiles(work, mask, first, step);
    launch.tiles.push_back(work);
  }
}

/// Few long and many short work tiles, some without steps; causal masks, windows, groups of heads;
/// sometimes one kind of work tile only.
BwdLaunch draw_launch(const core::Sm90BwdTraits& shape, std::uint64_t seed) {
  verify::Random random(seed);
  BwdLaunch launch{};
  launch.dirty_tail = random.chance(0.5);
  launch.num_ctas = static_cast<std::int32_t>(random.between(1, 3));
  const bool dkdv = random.chance(0.85), dq = !dkdv || random.chance(0.85);
  const std::int64_t only = random.between(0, 9);  // 0 or 1: dv or dk
  std::vector<std::pair<core::Mask, std::int32_t>> sequences;
  for (std::int64_t i = random.between(1, 3); i > 0; --i) {
    const auto q_len = static_cast<std::int32_t>(random.between(1, 700));
    const auto kv_len = static_cast<std::int32_t>(random.between(1, 700));
    const std::int64_t left = random.chance(0.3) ? random.between(0, 200) : -1;
    const std::int64_t right = random.chance(0.5) ? random.between(0, 100) : -1;
    const std::int64_t diagonal = random.chance(0.7) ? kv_len - q_len : random.between(-400, 400);
    sequences.push_back({{diagonal, left, right, kv_len, {}}, q_len});
  }
  const auto heads = static_cast<std::int32_t>(random.between(1, 3));
  const auto add = [&](BackwardOutput output) {
    for (const auto& [mask, q_len] : sequences) {
      if (output == BackwardOutput::dq) {
        add_tiles(launch, output, mask, q_len, 1, shape.key_step());
      } else {
        add_tiles(launch, output, core::transposed(mask, q_len), mask.kv_len, heads,
                  shape.query_step());
      }
    }
  };
  if (!shape.splits_dkdv() && dkdv) add(BackwardOutput::dkdv);
  if (dq) add(BackwardOutput::dq);
  if (shape.splits_dkdv() && dkdv && only != 0) add(BackwardOutput::dk);
  if (shape.splits_dkdv() && dkdv && only != 1) add(BackwardOutput::dv);
  return launch;
}

/// The violation that a random launch shows, or an empty text.
template <core::Sm90BwdTraits kShape>
std::string run_random(std::uint64_t seed, BwdFault fault) {
  BwdLaunch launch = draw_launch(kShape, seed);
  try {
    run_bwd_model<kShape>(launch, fault, seed);
  } catch (const Violation& violation) {
    return violation.message + "; seed " + std::to_string(seed);
  }
  return "";
}

const auto kProblems = static_cast<std::uint64_t>(test::rounds(75));  // for each shape

template <core::Sm90BwdTraits kShape>
void expect_no_violation() {
  for (std::uint64_t seed = 0; seed < kProblems; ++seed) {
    ASSERT_EQ(run_random<kShape>(seed, BwdFault::none), "") << "head_dim " << kShape.head_dim;
  }
}

/// Expects that one of a hundred launches shows the fault. Prints the violation.
template <core::Sm90BwdTraits kShape>
void expect_found_in(BwdFault fault) {
  std::string found;
  for (std::uint64_t seed = 0; seed < 100 && found.empty(); ++seed) {
    found = run_random<kShape>(seed, fault);
  }
  EXPECT_NE(found, "");
  std::printf("%s\n", found.c_str());
}

void expect_found(BwdFault fault) {
  expect_found_in<core::Sm90BwdTraits{128, 128, 4}>(fault);
  expect_found_in<core::Sm90BwdTraits{256, 256, 2}>(fault);
}

TEST(Sm90BwdProtocol, EveryInterleavingEndsWithEveryRowWrittenOnce) {
  expect_no_violation<core::Sm90BwdTraits{64, 64, 4}>();
  expect_no_violation<core::Sm90BwdTraits{128, 128, 4}>();
  expect_no_violation<core::Sm90BwdTraits{192, 128, 4}>();
  expect_no_violation<core::Sm90BwdTraits{256, 256, 2}>();
  expect_no_violation<core::Sm90BwdTraits{64, 64, 4, true}>();
  expect_no_violation<core::Sm90BwdTraits{128, 128, 4, true}>();
  expect_no_violation<core::Sm90BwdTraits{192, 128, 4, true}>();
  expect_no_violation<core::Sm90BwdTraits{256, 256, 2, true}>();
}

TEST(Sm90BwdProtocol, FindsAMissingArrival) { expect_found(BwdFault::arrival_missing); }
TEST(Sm90BwdProtocol, FindsAWrongExpectedCount) { expect_found(BwdFault::arrivals_too_few); }
TEST(Sm90BwdProtocol, FindsASlotReleasedEarly) { expect_found(BwdFault::released_early); }

/// The tiles of a warpgroup contain every visible pair, and unmasked tiles no other pair.
TEST(Sm90BwdProtocol, TilesCoverTheVisiblePairs) {
  verify::Random random(1);
  for (int i = 0; i < test::rounds(750); ++i) {
    const auto rows = static_cast<std::int32_t>(random.between(1, 300));
    const auto columns = static_cast<std::int32_t>(random.between(1, 300));
    const std::int64_t left = random.chance(0.5) ? random.between(0, 200) : -1;
    const std::int64_t right = random.chance(0.5) ? random.between(0, 200) : -1;
    const core::Mask mask{random.between(-200, 200), left, right, columns, {}};
    const core::Mask keys_as_rows = core::transposed(mask, rows);
    std::vector<core::KeyRange> rows_of_keys;
    for (std::int32_t column = 0; column < columns; ++column) {
      rows_of_keys.push_back(core::visible_keys(keys_as_rows, column));
    }
    constexpr std::int32_t kStep = 64;
    for (std::int32_t first = 0; first < rows; first += core::kBwdTileRows) {
      core::BwdSteps work{};
      work.rows = std::min(core::kBwdTileRows, rows - first);
      work.heads = 1;
      core::find_bwd_tiles(work, mask, first, kStep);
      for (std::int32_t row = first; row < first + work.rows; ++row) {
        const int group = (row - first) / 64;
        const core::KeyRange seen = core::visible_keys(mask, row);
        for (std::int32_t column = 0; column < columns; ++column) {
          const bool visible = seen.contains(column);
          const bool transposed = rows_of_keys[static_cast<std::size_t>(column)].contains(row);
          const bool computed = work.tiles > 0 && work.group_tiles[group].contains(column / kStep);
          const bool unmasked = work.unmasked_tiles[group].contains(column / kStep);
          ASSERT_TRUE(transposed == visible && (computed || !visible) &&
                      (visible || !computed || !unmasked))
              << "problem " << i << " row " << row << " column " << column << ": visible "
              << visible << ", by keys " << transposed << ", computed " << computed << ", unmasked "
              << unmasked;
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::protocol
