// Which keys a query sees. Causal order, windows and sequence lengths together always leave one
// interval of keys per query, whose ends never move left as the query index grows. Everything a
// kernel asks about masks is therefore a question about intervals.
#pragma once

#include <cstdint>

#include "core/config.h"
#include "core/fault.h"

namespace flashcore::core {

/// Keys begin <= j < end; empty where end <= begin.
struct KeyRange {
  std::int32_t begin;
  std::int32_t end;

  FLASHCORE_HD constexpr bool empty() const { return end <= begin; }
  FLASHCORE_HD constexpr bool contains(std::int32_t key) const { return begin <= key && key < end; }
};

FLASHCORE_HD constexpr std::int64_t min64(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
FLASHCORE_HD constexpr std::int64_t max64(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

FLASHCORE_HD constexpr KeyRange intersect(KeyRange a, KeyRange b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

/// The mask of one sequence. Query i stands on key `i + diagonal`
/// (diagonal = q_start - k_start).
struct Mask {
  std::int64_t diagonal;
  std::int64_t left;   // keys kept left of the diagonal; -1: all
  std::int64_t right;  // keys kept right of it; -1: all; causal is 0
  std::int32_t kv_len;
  Fault fault;
};

/// The keys that query i sees.
FLASHCORE_HD constexpr KeyRange visible_keys(const Mask& mask, std::int64_t i) {
  const std::int64_t centre = i + mask.diagonal;
  std::int64_t begin = mask.left < 0 ? 0 : max64(centre - mask.left, 0);
  std::int64_t end = mask.right < 0 ? mask.kv_len : min64(centre + mask.right + 1, mask.kv_len);
  if (mask.fault.is(InjectedFault::causal_off_by_one) && mask.right >= 0) {
    end = min64(centre + mask.right + 2, mask.kv_len);
  }
  if (mask.fault.is(InjectedFault::window_off_by_one) && mask.left >= 0) {
    begin = max64(centre - mask.left + 1, 0);
  }
  if (mask.fault.is(InjectedFault::tail_key_dropped)) end = min64(end, mask.kv_len - 1);
  begin = min64(begin, mask.kv_len);
  end = max64(end, 0);
  return {static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end)};
}

/// The same for queries first + i, i < kEdgeReach, of which this is what 32 bits need to know: they
/// see the keys of [begin + i, min(end + i, last)).
struct MaskEdges {
  std::int32_t begin, end, last;
};
inline constexpr std::int32_t kEdgeReach = 1024;

FLASHCORE_HD constexpr MaskEdges mask_edges(const Mask& mask, std::int64_t first) {
  constexpr std::int64_t kLowest = -kEdgeReach, kHighest = 0x7fffffff - kEdgeReach;
  const std::int64_t centre = first + mask.diagonal;
  std::int64_t begin = mask.left < 0 ? kLowest : centre - mask.left;
  std::int64_t end = mask.right < 0 ? kHighest : centre + mask.right + 1;
  if (mask.fault.is(InjectedFault::causal_off_by_one) && mask.right >= 0) ++end;
  if (mask.fault.is(InjectedFault::window_off_by_one) && mask.left >= 0) ++begin;
  return {static_cast<std::int32_t>(min64(max64(begin, kLowest), kHighest)),
          static_cast<std::int32_t>(min64(max64(end, kLowest), kHighest)),
          mask.kv_len - (mask.fault.is(InjectedFault::tail_key_dropped) ? 1 : 0)};
}

/// The smallest interval holding every key that some query of [first, last] sees.
FLASHCORE_HD constexpr KeyRange keys_seen_by_any(const Mask& mask, std::int64_t first,
                                                 std::int64_t last) {
  return {visible_keys(mask, first).begin, visible_keys(mask, last).end};
}

/// The keys that every query of [first, last] sees: tiles inside need no masking.
FLASHCORE_HD constexpr KeyRange keys_seen_by_all(const Mask& mask, std::int64_t first,
                                                 std::int64_t last) {
  return {visible_keys(mask, last).begin, visible_keys(mask, first).end};
}

/// The first key of the tile that holds `key`. Tiles always start at multiples of tile_k from key
/// 0, so the tiles of a row do not depend on which of them its neighbours can skip.
FLASHCORE_HD constexpr std::int32_t tile_begin(std::int32_t key, std::int32_t tile_k) {
  return key / tile_k * tile_k;
}

/// The keys of split `split`; the last ones may be empty.
FLASHCORE_HD constexpr KeyRange split_keys(std::int32_t split, std::int64_t keys_per_split,
                                           std::int32_t kv_len) {
  const std::int64_t begin = min64(split * keys_per_split, kv_len);
  return {static_cast<std::int32_t>(begin),
          static_cast<std::int32_t>(min64(begin + keys_per_split, kv_len))};
}

}  // namespace flashcore::core
