// The steps of a Hopper work tile for gradients, and the share of them that each warpgroup
// computes.
#pragma once

#include "core/mask.h"
#include "core/sm90_bwd_pipeline.h"

namespace flashcore::core {

/// A position among the steps of a work tile.
struct BwdStep {
  std::int32_t tile;  // of B
  std::int32_t head;  // of the work tile's heads

  FLASHCORE_HD void advance(std::int32_t heads) {
    if (++head == heads) {
      head = 0;
      ++tile;
    }
  }
};

/// Steps go through the tiles of B and, for each tile, through the query heads of the group (dkdv)
/// or one head (dq).
struct BwdSteps {
  BackwardOutput output;  // kBwdQueueEnd: end of the queue
  std::int32_t rows;      // rows of A
  std::int32_t first_tile, tiles, heads;
  // Tiles per warpgroup. If there are steps, it computes at least one tile.
  KeyRange group_tiles[kBwdConsumers];
  KeyRange unmasked_tiles[kBwdConsumers];  // every row of A sees every row of B

  FLASHCORE_HD std::int32_t steps() const { return tiles * heads; }
  FLASHCORE_HD bool is_last(const BwdStep& step, int group) const {
    return step.tile + 1 == group_tiles[group].end && step.head + 1 == heads;
  }
  /// Steps before and after those of a warpgroup.
  FLASHCORE_HD std::int32_t steps_before(int group) const {
    return (group_tiles[group].begin - first_tile) * heads;
  }
  FLASHCORE_HD std::int32_t steps_after(int group) const {
    return (first_tile + tiles - group_tiles[group].end) * heads;
  }
};
inline constexpr auto kBwdQueueEnd = static_cast<BackwardOutput>(-1);

/// The mask with keys as rows: "visible_keys" of key j are the queries that see it.
FLASHCORE_HD constexpr Mask transposed(const Mask& mask, std::int32_t q_len) {
  return {-mask.diagonal, mask.right, mask.left, q_len, {}};
}

/// Finds the tiles of `step` rows of B for rows [first, first + work.rows) of A. `mask` has the
/// rows of A as queries.
FLASHCORE_HD void find_bwd_tiles(BwdSteps& work, const Mask& mask, std::int32_t first,
                                 std::int32_t step) {
  const std::int32_t last = first + work.rows - 1;
  const KeyRange seen = keys_seen_by_any(mask, first, last);
  work.first_tile = seen.begin / step;
  work.tiles = seen.empty() ? 0 : (seen.end - 1) / step + 1 - work.first_tile;
  const std::int32_t end_tile = work.first_tile + work.tiles;
  FLASHCORE_LOOP
  for (int group = 0; group < kBwdConsumers; ++group) {
    const std::int32_t rows = kBwdTileRows / kBwdConsumers;
    const std::int32_t own = first + rows * group;
    const std::int32_t own_first = own < last ? own : last;
    const std::int32_t own_last = own + rows - 1 < last ? own + rows - 1 : last;
    const KeyRange of_first = visible_keys(mask, own_first);
    const KeyRange of_last = visible_keys(mask, own_last);
    work.unmasked_tiles[group] = {(of_last.begin + step - 1) / step, of_first.end / step};
    const std::int32_t begin = of_first.begin / step;
    const std::int32_t end = (of_last.end + step - 1) / step;
    KeyRange& tiles = work.group_tiles[group];
    tiles.begin = begin < end_tile - 1 ? begin : end_tile - 1;
    if (tiles.begin < work.first_tile) tiles.begin = work.first_tile;
    tiles.end = end < end_tile ? end : end_tile;
    if (tiles.end <= tiles.begin) tiles.end = tiles.begin + 1;
  }
}

}  // namespace flashcore::core
