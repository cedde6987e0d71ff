// core/paged_kv.h: the location of a key for every page size, and the handling of bad page ids.
#include "core/paged_kv.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "core/seq_info.h"

namespace flashcore::core {
namespace {

TEST(PageTable, LocatesEveryKeyForEveryPageSize) {
  constexpr std::int32_t kKeys = 600, kPages = 700;
  std::vector<std::int32_t> table(2 * 620);
  for (std::size_t i = 0; i < table.size(); ++i) {
    table[i] = static_cast<std::int32_t>((i * 389 + 5) % kPages);
  }
  for (std::int32_t size = 1; size <= 256; ++size) {
    const PageTable pages{table.data(), 620, size, page_shift(size), kPages};
    const KvRowMap rows = kv_row_map(pages, 1, 0);
    std::int32_t slot = 0, row = 0;  // expected, by counting
    for (std::int32_t key = 0; key < kKeys; ++key) {
      const KvLocation location = rows.at(key);
      ASSERT_EQ(location.block, table[static_cast<std::size_t>(620 + slot)]) << size << " " << key;
      ASSERT_EQ(location.row, row) << size << " " << key;
      ASSERT_EQ(rows.run_from(key), size - row) << size << " " << key;
      ASSERT_EQ(slots_in_use(pages, key + 1), slot + 1) << size << " " << key;
      if (++row == size) row = 0, ++slot;
    }
    ASSERT_EQ(slots_in_use(pages, 0), 0);
  }
}

TEST(PageTable, FoundKeysAreCheckedLater) {
  const std::int32_t table[] = {3, 7, -1};
  const KvRowMap rows = kv_row_map({table, 3, 4, 2, 7}, 0, 0);
  const std::int32_t wanted[] = {3, 0, 0};  // 7 and -1 are no pages
  for (std::int32_t slot = 0; slot < 3; ++slot) {
    const KvLocation found = rows.find(4 * slot + 1);
    EXPECT_EQ(found.block, table[slot]);
    EXPECT_EQ(rows.checked(found).block, wanted[slot]);
    EXPECT_EQ(rows.checked(found).row, 1);
    EXPECT_EQ(rows.at(4 * slot + 1).block, wanted[slot]);
  }
}

TEST(PageTable, OnlyPowersOfTwoHaveAShift) {
  for (std::int32_t size = 1; size <= 256; ++size) {
    const bool power = (size & (size - 1)) == 0;
    ASSERT_EQ(page_shift(size) >= 0, power) << size;
    if (power) {
      ASSERT_EQ(1 << page_shift(size), size);
    }
  }
}

TEST(PageTable, ABoxIsThePowerOfTwoThatDividesPageAndTile) {
  for (std::int32_t page = 1; page <= 256; ++page) {
    for (std::int32_t tile = 64; tile <= 208; tile += 16) {
      const std::int32_t rows = 1 << page_box_log2(page, tile);
      ASSERT_TRUE(page % rows == 0 && tile % rows == 0) << page << " " << tile;
      ASSERT_TRUE(page % (2 * rows) != 0 || tile % (2 * rows) != 0) << page << " " << tile;
    }
  }
}

TEST(PageTable, DenseKeysAreContiguous) {
  const KvRowMap rows = kv_row_map(PageTable{}, 3, 40);
  EXPECT_EQ(rows.at(7).block, 3);
  EXPECT_EQ(rows.at(7).row, 47);
  EXPECT_GE(rows.run_from(7), 1 << 30);
  EXPECT_EQ(slots_in_use(PageTable{}, 1000), 0);
}

TEST(PageTable, BadIdsAreReportedAndNeverUsed) {
  const std::int32_t table[] = {2, -1, 3, INT32_MAX, INT32_MIN, 0};
  const PageTable pages{table, 3, 16, page_shift(16), 3};
  const bool bad[] = {false, true, true, true, true, false};
  for (std::int32_t b = 0; b < 2; ++b) {
    for (std::int32_t slot = 0; slot < 3; ++slot) {
      const std::int32_t id = table[b * 3 + slot];
      const ErrorSlot found = page_error(pages, b, slot);
      const KvLocation location = kv_row_map(pages, b, 0).at(16 * slot + 5);
      EXPECT_EQ(location.row, 5);
      if (!bad[b * 3 + slot]) {
        EXPECT_EQ(found.code, 0);
        EXPECT_EQ(location.block, id);
        continue;
      }
      EXPECT_EQ(location.block, 0);
      EXPECT_EQ(found.code, static_cast<std::int32_t>(ErrorCode::page_id_out_of_range));
      EXPECT_EQ(found.batch, b);
      EXPECT_EQ(found.index, slot);
      EXPECT_EQ(found.value, id);
    }
  }
}

}  // namespace
}  // namespace flashcore::core
