// Locations of a sequence's keys. Dense K and V have one block of rows per sequence, varlen K and V
// one block for all sequences. Paged K and V have blocks of a few rows; a sequence's row of the
// block table lists its pages in order. All code that reads or writes a KV cache uses these
// functions.
#pragma once

#include <cstdint>

#include "core/config.h"

namespace flashcore::core {

/// The pages of K and V. Page ids are checked with valid() before use.
struct PageTable {
  const std::int32_t* table;  // [batch, max_pages] page ids; null: K and V are not paged
  std::int64_t table_stride;  // between the rows of two sequences
  std::int32_t size;          // keys per page
  std::int32_t shift;         // log2(size), or -1: not a power of two
  std::int32_t count;         // number of pages

  FLASHCORE_HD constexpr bool valid(std::int32_t id) const {
    return static_cast<std::uint32_t>(id) < static_cast<std::uint32_t>(count);
  }
  /// Index of a key's page in its sequence. A division takes a GPU about twenty instructions.
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

/// log2 of the rows of a TMA box, which are in one page and in one KV tile: the largest power of
/// two that divides page size and tile. Boxes of any height fit together in a tile: the swizzle
/// follows the address in shared memory.
FLASHCORE_HD constexpr int page_box_log2(int page_size, int tile_k) {
  const int both = page_size | tile_k;
  return page_shift(both & -both);
}

/// Location of a key. K and V share it and differ in strides.
struct KvLocation {
  std::int32_t block;  // multiplies Strides::batch: the page, or the sequence if not paged
  std::int32_t row;    // multiplies Strides::row
};

/// Maps the keys of one sequence to their locations.
struct KvRowMap {
  PageTable pages;
  const std::int32_t* table;  // the sequence's row of the block table; null: not paged
  std::int32_t block;         // of all keys, if not paged
  std::int32_t first_row;     // row of key 0, if not paged

  /// Location of a key below the sequence's length. Table entries past that length are not read.
  /// An invalid page id counts as page 0, which exists.
  FLASHCORE_HD constexpr KvLocation at(std::int32_t key) const {
    return table == nullptr ? KvLocation{block, first_row + key} : checked(find(key));
  }

  /// at() of paged KV in two steps. find() does not look at the page id that it loads: a warp waits
  /// for it in checked().
  FLASHCORE_HD constexpr KvLocation find(std::int32_t key) const {
    const std::int32_t slot = pages.page_index(key);
    return {table[slot], key - slot * pages.size};
  }
  FLASHCORE_HD constexpr KvLocation checked(KvLocation found) const {
    return {pages.valid(found.block) ? found.block : 0, found.row};
  }

  /// Number of keys from `key` on in the same block, at least one. For copies of several rows.
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
