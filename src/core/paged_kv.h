// Where the keys of a sequence lie. K and V are one block of rows per sequence, one packed block
// for all, or pages: blocks of a few rows each that belong to a sequence in the order of its row
// in the block table. Everybody who reads or writes a cache asks here.
#pragma once

#include <cstdint>

#include "core/config.h"

namespace flashcore::core {

/// The pages of K and V. Ids are never trusted: valid() decides before one is used.
struct PageTable {
  const std::int32_t* table;  // [batch, max_pages] page ids, or null: K and V have no pages
  std::int64_t table_stride;  // from one sequence's row to the next
  std::int32_t size;          // keys of a page
  std::int32_t shift;         // log2(size), or -1: not a power of two
  std::int32_t count;         // pages there are

  FLASHCORE_HD constexpr bool valid(std::int32_t id) const {
    return static_cast<std::uint32_t>(id) < static_cast<std::uint32_t>(count);
  }
  /// Which of its sequence's pages holds a key. A division costs a GPU some twenty instructions.
  FLASHCORE_HD constexpr std::int32_t page_index(std::int32_t key) const {
    return shift >= 0 ? key >> shift : key / size;
  }
};

FLASHCORE_HD constexpr std::int32_t page_shift(std::int32_t size) {
  for (int shift = 0; shift < 31; ++shift) {
    if (size == 1 << shift) return shift;
  }
  return -1;
}

/// A key's place: the same for K and V, whose strides differ.
struct KvLocation {
  std::int32_t block;  // times Strides::batch: a page, else the sequence
  std::int32_t row;    // times Strides::row
};

/// The keys of one sequence.
struct KvRowMap {
  PageTable pages;
  const std::int32_t* table;  // this sequence's row of the block table, or null
  std::int32_t block;         // where there are no pages: of all keys
  std::int32_t first_row;     // and the row of key 0

  /// Key `key` of those below the sequence's length: other entries of the table are not read. A
  /// bad page id counts as page 0, which exists.
  FLASHCORE_HD constexpr KvLocation at(std::int32_t key) const {
    if (table == nullptr) return {block, first_row + key};
    const std::int32_t slot = pages.page_index(key);
    const std::int32_t id = table[slot];
    return {pages.valid(id) ? id : 0, key - slot * pages.size};
  }

  /// How many keys from `key` on lie in one block, at least one: for who copies rows in a run.
  FLASHCORE_HD constexpr std::int32_t run_from(std::int32_t key) const {
    if (table == nullptr) return INT32_MAX;
    return pages.size - (key - pages.page_index(key) * pages.size);
  }
};

FLASHCORE_HD constexpr KvRowMap kv_row_map(const PageTable& pages, std::int32_t b,
                                           std::int32_t first_row) {
  return {pages, pages.table == nullptr ? nullptr : pages.table + b * pages.table_stride, b,
          first_row};
}

}  // namespace flashcore::core
