// core/mask.h against the definition of the masks, element by element.
#include "core/mask.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace flashcore::core {
namespace {

constexpr int kMost = 9;
constexpr std::int64_t kWindows[] = {-1, 0, 1, 3, 8, 20};

bool sees(const Mask& mask, std::int64_t i, std::int64_t key) {
  const std::int64_t position = i + mask.diagonal;
  if (mask.left >= 0 && key < position - mask.left) return false;
  return mask.right < 0 || key <= position + mask.right;
}

/// Calls body(mask) for all lengths and offsets up to a small bound, and for kWindows.
template <typename Body>
void for_each_mask(Body body) {
  for (std::int32_t kv_len = 0; kv_len <= kMost; ++kv_len) {
    for (const std::int64_t left : kWindows) {
      for (const std::int64_t right : kWindows) {
        for (std::int64_t diagonal = -2 * kMost; diagonal <= 2 * kMost; ++diagonal) {
          body(Mask{diagonal, left, right, kv_len, {}});
        }
      }
    }
  }
}

// Without the keys before its window a query, and every later one, sees the same keys.
TEST(Mask, DroppedKeysShiftTheVisibleOnes) {
  for_each_mask([](const Mask& mask) {
    for (std::int64_t first = 0; first < kMost; ++first) {
      const std::int32_t dropped = visible_keys(mask, first).begin;
      const Mask shifted = without_first_keys(mask, dropped);
      ASSERT_EQ(shifted.kv_len, mask.kv_len - dropped);
      for (std::int64_t i = first; i < kMost; ++i) {
        const KeyRange before = visible_keys(mask, i), after = visible_keys(shifted, i);
        if (before.empty()) {
          ASSERT_TRUE(after.empty()) << first << ' ' << i;
        } else {
          ASSERT_EQ(after.begin + dropped, before.begin) << first << ' ' << i;
          ASSERT_EQ(after.end + dropped, before.end) << first << ' ' << i;
        }
      }
    }
  });
}

TEST(Mask, VisibleKeysMatchTheDefinition) {
  for_each_mask([](const Mask& mask) {
    for (std::int64_t i = 0; i < kMost; ++i) {
      const KeyRange keys = visible_keys(mask, i);
      ASSERT_GE(keys.begin, 0);
      ASSERT_LE(keys.end, mask.kv_len);
      for (std::int32_t key = 0; key < mask.kv_len; ++key) {
        ASSERT_EQ(keys.contains(key), sees(mask, i, key))
            << "query " << i << " key " << key << " kv_len " << mask.kv_len << " left " << mask.left
            << " right " << mask.right << " diagonal " << mask.diagonal;
      }
    }
  });
}

/// True if query i sees the key, by the edges.
bool inside(const MaskEdges& edges, std::int32_t i, std::int32_t key) {
  return edges.begin + i <= key && key < std::min(edges.end + i, edges.last);
}

TEST(Mask, EdgesGiveTheVisibleKeysOfEveryQuery) {
  for_each_mask([](const Mask& mask) {
    for (const std::int64_t first : {0, 3}) {
      const MaskEdges edges = mask_edges(mask, first);
      for (std::int32_t i = 0; i < kMost; ++i) {
        const KeyRange keys = visible_keys(mask, first + i);
        for (std::int32_t key = 0; key < mask.kv_len; ++key) {
          ASSERT_EQ(inside(edges, i, key), keys.contains(key))
              << "query " << first << " + " << i << " key " << key << " kv_len " << mask.kv_len
              << " left " << mask.left << " right " << mask.right << " diagonal " << mask.diagonal;
        }
      }
    }
  });
}

TEST(Mask, EdgesOfFarPositionsDoNotOverflow) {
  constexpr std::int64_t kFar = std::int64_t{1} << 40;
  constexpr std::int32_t kKeys = std::numeric_limits<std::int32_t>::max() - 2 * kEdgeReach;
  for (const std::int64_t diagonal : {-kFar, -std::int64_t{kKeys}, std::int64_t{-1},
                                      std::int64_t{0}, std::int64_t{kKeys} - 5, kFar}) {
    for (const std::int64_t left : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{7}, kFar}) {
      for (const std::int64_t right : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{7}, kFar}) {
        const Mask mask{diagonal, left, right, kKeys, {}};
        const MaskEdges edges = mask_edges(mask, 5);
        for (const std::int32_t i : {0, 1, kEdgeReach - 1}) {
          const KeyRange keys = visible_keys(mask, 5 + i);
          for (const std::int32_t key :
               {0, 1, keys.begin - 1, keys.begin, keys.end - 1, keys.end, kKeys - 1}) {
            if (key < 0 || key >= kKeys) continue;
            EXPECT_EQ(inside(edges, i, key), keys.contains(key))
                << "query 5 + " << i << " key " << key << " left " << left << " right " << right
                << " diagonal " << diagonal;
          }
        }
      }
    }
  }
}

TEST(Mask, RangesNeverMoveLeft) {
  for_each_mask([](const Mask& mask) {
    for (std::int64_t i = 1; i < kMost; ++i) {
      ASSERT_GE(visible_keys(mask, i).begin, visible_keys(mask, i - 1).begin);
      ASSERT_GE(visible_keys(mask, i).end, visible_keys(mask, i - 1).end);
    }
  });
}

TEST(Mask, UnionAndIntersectionMatchTheDefinition) {
  for_each_mask([](const Mask& mask) {
    for (std::int64_t first = 0; first < kMost; first += 2) {
      for (std::int64_t last = first; last < kMost; ++last) {
        const KeyRange any = keys_seen_by_any(mask, first, last);
        const KeyRange all = keys_seen_by_all(mask, first, last);
        std::int32_t lowest = mask.kv_len, highest = -1;
        for (std::int32_t key = 0; key < mask.kv_len; ++key) {
          std::int64_t viewers = 0;
          for (std::int64_t i = first; i <= last; ++i) viewers += sees(mask, i, key) ? 1 : 0;
          if (viewers > 0) lowest = std::min(lowest, key), highest = key;
          ASSERT_EQ(all.contains(key), viewers == last - first + 1);
        }
        if (highest < 0) {
          ASSERT_TRUE(any.empty());
        } else {
          ASSERT_EQ(any.begin, lowest);
          ASSERT_EQ(any.end, highest + 1);
        }
      }
    }
  });
}

TEST(Mask, FarPositionsAndWideWindowsDoNotOverflow) {
  constexpr std::int64_t kFar = std::int64_t{1} << 31;
  constexpr std::int32_t kKeys = 1 << 30;
  for (const std::int64_t wide : {kFar, std::int64_t{1} << 40}) {
    const KeyRange all = visible_keys({-kFar, wide * 4, wide * 4, kKeys, {}}, 5);
    EXPECT_EQ(all.begin, 0);
    EXPECT_EQ(all.end, kKeys);
  }
  EXPECT_TRUE(visible_keys({-kFar, -1, 0, kKeys, {}}, 5).empty());
  const KeyRange causal = visible_keys({kFar, -1, 0, kKeys, {}}, 5);
  EXPECT_EQ(causal.end, kKeys);
  EXPECT_TRUE(visible_keys({kFar, 0, 0, kKeys, {}}, 5).empty());
}

TEST(Mask, IntersectHoldsCommonKeysOnly) {
  for (std::int32_t a = 0; a < 6; ++a) {
    for (std::int32_t b = 0; b < 6; ++b) {
      for (std::int32_t c = 0; c < 6; ++c) {
        for (std::int32_t d = 0; d < 6; ++d) {
          const KeyRange both = intersect({a, b}, {c, d});
          for (std::int32_t key = -1; key < 7; ++key) {
            ASSERT_EQ(both.contains(key),
                      KeyRange({a, b}).contains(key) && KeyRange({c, d}).contains(key));
          }
        }
      }
    }
  }
}

TEST(Mask, TileBeginIsTheLargestMultipleNotPastTheKey) {
  for (const std::int32_t tile : {1, 12, 16, 64, 96, 128}) {
    for (std::int32_t key = 0; key < 400; ++key) {
      const std::int32_t begin = tile_begin(key, tile);
      ASSERT_EQ(begin % tile, 0);
      ASSERT_LE(begin, key);
      ASSERT_GT(begin + tile, key);
    }
  }
}

TEST(Mask, SplitsCoverEveryKeyOnceInOrder) {
  for (const std::int64_t each : {std::int64_t{1}, std::int64_t{12}, std::int64_t{64}}) {
    for (std::int32_t kv_len = 0; kv_len <= 200; ++kv_len) {
      std::int32_t next = 0;
      const auto count = static_cast<std::int32_t>(kv_len / each + 2);  // the last ones are empty
      for (std::int32_t split = 0; split < count; ++split) {
        const KeyRange keys = split_keys(split, each, kv_len);
        ASSERT_EQ(keys.begin, next);
        ASSERT_LE(keys.begin, keys.end);
        ASSERT_LE(keys.end - keys.begin, each);
        next = keys.end;
      }
      ASSERT_EQ(next, kv_len);
    }
  }
  const KeyRange far = split_keys(1 << 30, std::int64_t{1} << 32, 1 << 30);
  EXPECT_TRUE(far.empty());
}

}  // namespace
}  // namespace flashcore::core
