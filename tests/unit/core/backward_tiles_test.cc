// The work tiles of gradients on GPUs.
#include "core/backward_tiles.h"

#include <gtest/gtest.h>

#include "core/ds_unit.h"

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

TEST(BackwardTiles, QueriesThatSeeAllKeysAreFound) {
  constexpr std::int32_t kQueries = 7, kKeys = 6, kTile = 2;
  for (std::int64_t diagonal = -9; diagonal <= 9; ++diagonal) {
    for (std::int64_t left = -1; left <= 8; ++left) {
      for (std::int64_t right = -1; right <= 8; ++right) {
        const Mask mask{diagonal, left, right, kKeys, {}};
        for (std::int32_t first = 0; first < kKeys + kTile; ++first) {
          const KeyRange keys{first, first + kTile};
          const KeyRange got = queries_that_see_all(mask, keys, kQueries);
          for (std::int32_t i = 0; i < kQueries; ++i) {
            const KeyRange seen = visible_keys(mask, i);
            ASSERT_EQ(got.contains(i), seen.begin <= keys.begin && keys.end <= seen.end)
                << diagonal << " " << left << " " << right << " " << first << " " << i;
          }
        }
      }
    }
  }
}

TEST(BackwardTiles, UnitKeepsGradientsOfScoresInTheRangeOfF16) {
  std::uint32_t norms[kDsNorms * 2] = {};  // of 2 KV heads
  BackwardParams p{};
  p.fwd.batch = 1;
  p.fwd.kv_heads = 2;
  EXPECT_EQ(ds_unit(p, 0, 1), 1.f) << "without norms";
  p.dout_largest = norms;
  EXPECT_EQ(ds_unit(p, 0, 1), 1.f) << "norms of 0";
  for (const float dout : {1e-7f, 0.3f, 1.f, 4.f, 5e5f}) {
    for (const float v : {1e-7f, 1.f, 900.f}) {
      for (const float delta : {0.f, 1e-9f, 2.f, 1e20f}) {
        norms[ds_norm_index(p, DsNorm::dout, 0, 1)] = bits_of_float(dout);
        norms[ds_norm_index(p, DsNorm::v, 0, 1)] = bits_of_float(v);
        norms[ds_norm_index(p, DsNorm::delta, 0, 1)] = bits_of_float(delta);
        const float largest = (dout * v + delta) * ds_unit(p, 0, 1);
        EXPECT_GE(largest, 0x1p14f) << dout << " " << v << " " << delta;
        EXPECT_LT(largest, 0x1p15f) << dout << " " << v << " " << delta;
      }
    }
  }
  EXPECT_EQ(ds_unit(p, 0, 0), 1.f) << "the other head";
}

}  // namespace
}  // namespace flashcore::core
