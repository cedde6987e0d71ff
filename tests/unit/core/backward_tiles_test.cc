// The work tiles of gradients on GPUs.
#include "core/backward_tiles.h"

#include <gtest/gtest.h>

namespace flashcore::core {
namespace {

/// The queries that see a key of `keys`, found by trying all of them.
KeyRange tried(const Mask& mask, KeyRange keys, std::int32_t q_len) {
  KeyRange found{0, 0};
  for (std::int32_t i = 0; i < q_len; ++i) {
    if (intersect(visible_keys(mask, i), keys).empty()) continue;
    if (found.empty()) found.begin = i;
    found.end = i + 1;
  }
  return found;
}

TEST(BackwardTiles, QueriesThatSeeKeysAreTheInverseOfVisibleKeys) {
  constexpr std::int32_t kQueries = 7, kKeys = 6, kTile = 2;
  for (std::int64_t diagonal = -9; diagonal <= 9; ++diagonal) {
    for (std::int64_t left = -1; left <= 8; ++left) {
      for (std::int64_t right = -1; right <= 8; ++right) {
        const Mask mask{diagonal, left, right, kKeys, {}};
        for (std::int32_t first = 0; first < kKeys + kTile; ++first) {
          const KeyRange keys{first, first + kTile};
          const KeyRange got = queries_that_see(mask, keys, kQueries);
          const KeyRange want = tried(mask, keys, kQueries);
          ASSERT_EQ(got.begin, want.begin)
              << diagonal << " " << left << " " << right << " " << first;
          ASSERT_EQ(got.end, want.end) << diagonal << " " << left << " " << right << " " << first;
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::core
