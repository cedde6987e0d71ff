// The keys that a query sees. Causal masks, windows and sequence lengths leave one interval of keys
// per query. Its ends never move left as the query index grows, so the intervals of a tile follow
// from those of its first and last query.
#pragma once

#include <cstdint>

#include "core/config.h"
#include "core/fault.h"

namespace flashcore::core {

/// Keys begin <= j < end; empty if end <= begin.
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

/// The mask of one sequence. Query i has the position of key `i + diagonal`
/// (diagonal = q_start - k_start).
struct Mask {
  std::int64_t diagonal;
  std::int64_t left;   // visible keys left of the diagonal; -1: all
  std::int64_t right;  // visible keys right of the diagonal; -1: all; 0: causal
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

/// The mask of the same sequence without its first `keys` keys.
FLASHCORE_HD constexpr Mask without_first_keys(const Mask& mask, std::int32_t keys) {
  return {mask.diagonal - keys, mask.left, mask.right, mask.kv_len - keys, mask.fault};
}

/// visible_keys() in 32-bit arithmetic: query first + i, 0 <= i < kEdgeReach, sees the keys
/// [begin + i, min(end + i, last)), where begin + i may be negative.
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

/// The smallest interval that contains every key that some query of [first, last] sees.
FLASHCORE_HD constexpr KeyRange keys_seen_by_any(const Mask& mask, std::int64_t first,
                                                 std::int64_t last) {
  return {visible_keys(mask, first).begin, visible_keys(mask, last).end};
}

/// The keys that every query of [first, last] sees. KV tiles inside it need no mask.
FLASHCORE_HD constexpr KeyRange keys_seen_by_all(const Mask& mask, std::int64_t first,
                                                 std::int64_t last) {
  return {visible_keys(mask, last).begin, visible_keys(mask, first).end};
}

/// The first key of the KV tile that contains `key`. Tiles start at multiples of tile_k from key 0,
/// so the tiles of a row do not depend on the tiles that other rows skip (but see
/// tiles_from_window() in plan/kernel_traits.h).
FLASHCORE_HD constexpr std::int32_t tile_begin(std::int32_t key, std::int32_t tile_k) {
  return key / tile_k * tile_k;
}

/// The keys of split `split`. The last splits may be empty.
FLASHCORE_HD constexpr KeyRange split_keys(std::int32_t split, std::int64_t keys_per_split,
                                           std::int32_t kv_len) {
  const std::int64_t begin = min64(split * keys_per_split, kv_len);
  return {static_cast<std::int32_t>(begin),
          static_cast<std::int32_t>(min64(begin + keys_per_split, kv_len))};
}

}  // namespace flashcore::core
