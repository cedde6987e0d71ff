#include "core/key_ranges.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

namespace flashcore::core {
namespace {

constexpr float kInfinity = INFINITY;

/// Row statistics and one column of the output.
struct Row {
  SoftmaxState<float> state;
  float out;
};

Row folded(const Row& a, const Row& b) {
  const FoldedStats stats = fold(a.state, b.state);
  return {stats.state, weighted_sum(a.out, stats.weight[0], b.out, stats.weight[1])};
}

/// One row over some keys, as a kernel leaves it.
Row row_of(const std::vector<float>& scores, const std::vector<float>& values, KeyRange keys) {
  Row row{{-kInfinity, 0.f}, 0.f};
  for (std::int32_t j = keys.begin; j < keys.end; ++j) {
    row.state.max = std::max(row.state.max, scores[static_cast<std::size_t>(j)]);
  }
  for (std::int32_t j = keys.begin; j < keys.end; ++j) {
    const auto at = static_cast<std::size_t>(j);
    const float weight = std::exp(scores[at] - row.state.max);
    row.state.sum += weight;
    row.out += weight * values[at];
  }
  return row;
}

bool same_bits(const Row& a, const Row& b) {
  return std::bit_cast<std::uint32_t>(a.state.max) == std::bit_cast<std::uint32_t>(b.state.max) &&
         std::bit_cast<std::uint32_t>(a.state.sum) == std::bit_cast<std::uint32_t>(b.state.sum) &&
         std::bit_cast<std::uint32_t>(a.out) == std::bit_cast<std::uint32_t>(b.out);
}

TEST(KeyRanges, TheRangesContainTheVisibleKeysAndNoneIsWithout) {
  for (const std::int32_t keys : {1, 7, 1920}) {
    for (const std::int32_t begin : {0, 1, 6, 7, 1919, 1920, 1921, 9000}) {
      for (const std::int32_t length : {1, 2, 7, 8, 1920, 1921, 9000}) {
        const KeyRange visible{begin, begin + length};
        const KeyRanges ranges = ranges_of(visible, keys);
        ASSERT_GE(ranges.count, 1);
        std::int32_t next = keys_of_range(ranges.first, keys).begin;
        EXPECT_LE(next, visible.begin);
        for (std::int32_t i = 0; i < ranges.count; ++i) {
          const KeyRange range = keys_of_range(ranges.first + i, keys);
          EXPECT_EQ(range.begin, next);
          EXPECT_EQ(range.end - range.begin, keys);
          EXPECT_FALSE(intersect(range, visible).empty()) << begin << ' ' << length << ' ' << i;
          next = range.end;
        }
        EXPECT_GE(next, visible.end);
      }
    }
  }
}

TEST(KeyRanges, NoKeysAreOneRange) {
  EXPECT_EQ(ranges_of({0, 0}, 1920).count, 1);
  EXPECT_EQ(ranges_of({5000, 5000}, 1920).first, 0);
  EXPECT_EQ(ranges_of({5000, 4000}, 1920).count, 1);
}

TEST(KeyRanges, TheLastRangeEndsAtTheLargestLength) {
  constexpr std::int32_t kMost = 0x7fffffff;
  const KeyRanges ranges = ranges_of({kMost - 1, kMost}, 1920);
  EXPECT_EQ(ranges.count, 1);
  EXPECT_EQ(keys_of_range(ranges.first, 1920).end, kMost);
}

// A tile folds its ranges for all of its rows, and some of its rows see fewer of them.
TEST(KeyRanges, RangesWithoutKeysOfARowChangeNoBit) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const Row empty{{-kInfinity, 0.f}, 0.f};
  for (int i = 0; i < 1000; ++i) {
    const Row row{{1000 * normal(random), 1 + std::abs(normal(random))}, normal(random)};
    EXPECT_TRUE(same_bits(folded(row, empty), row));
    EXPECT_TRUE(same_bits(folded(empty, row), row));
  }
  EXPECT_TRUE(same_bits(folded(empty, empty), empty));
}

// CTAs that fold have the result so far in registers or in memory.
TEST(KeyRanges, EitherResultMayComeFirst) {
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  for (int i = 0; i < 1000; ++i) {
    const Row a{{3 * normal(random), 1 + std::abs(normal(random))}, normal(random)};
    const Row b{{3 * normal(random), 1 + std::abs(normal(random))}, normal(random)};
    EXPECT_TRUE(same_bits(folded(a, b), folded(b, a)));
  }
}

TEST(KeyRanges, FoldedRangesAreAttentionOverAllKeys) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> scores(1000), values(1000);
  for (float& x : scores) x = 4 * normal(random);
  for (float& x : values) x = normal(random);
  const Row whole = row_of(scores, values, {0, 1000});
  for (const std::int32_t keys : {1, 16, 333, 999, 1000}) {
    const KeyRanges ranges = ranges_of({0, 1000}, keys);
    const auto part = [&](std::int32_t index) {
      return row_of(scores, values, intersect(keys_of_range(index, keys), {0, 1000}));
    };
    Row all = part(0);
    for (std::int32_t i = 1; i < ranges.count; ++i) all = folded(all, part(i));
    EXPECT_EQ(all.state.max, whole.state.max);
    EXPECT_NEAR(all.state.sum, whole.state.sum, 1e-4f * whole.state.sum);
    EXPECT_NEAR(all.out / all.state.sum, whole.out / whole.state.sum, 1e-4f);
  }
}

}  // namespace
}  // namespace flashcore::core
