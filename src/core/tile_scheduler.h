// The order of a persistent kernel's work tiles, PackGQA and the tail split. The kernel reads it to
// find its tiles, the planner to model the launch.
#pragma once

#include <cstdint>

#include "core/fast_divmod.h"

namespace flashcore::core {

inline constexpr int kQTileRows = 64;  // query rows of one consumer warpgroup
inline constexpr int kWarpRows = 16;
inline constexpr int kMaxHeadsInTile = kQTileRows / kWarpRows;  // all rows of a warp have one head

/// PackGQA: a tile holds rows of 2^log2 query heads that share K and V. A 64-row Q tile holds as
/// many queries of each head, one head after the other. Its rows are then closer together under a
/// causal mask, so that fewer of its keys are masked.
struct PackGqa {
  std::int32_t log2;

  /// Queries of each head in a Q tile.
  FLASHCORE_HD constexpr std::int32_t queries() const { return kQTileRows >> log2; }
  FLASHCORE_HD constexpr std::int32_t head(std::int32_t row) const {
    return (row % kQTileRows << log2) / kQTileRows;
  }
  FLASHCORE_HD constexpr std::int32_t query(std::int32_t row) const {
    return row / kQTileRows * queries() + (row & (queries() - 1));
  }
};

struct TileCoord {
  std::int32_t batch, head, q_tile;
};

/// The order of the tiles. Heads that share K and V form a group and are adjacent, so that
/// neighbouring CTAs read the same keys at the same time from L2. Within a group the last query
/// tile comes first: it is the longest under a causal mask. The last groups are ordered as one, so
/// that no long tile starts last.
struct TileScheduler {
  std::int32_t tiles;
  std::int32_t q_tiles;
  std::int32_t group;         // query heads that share K and V
  std::int32_t whole_groups;  // groups in sequence; the others are ordered as one
  FastDivmod group_tiles_divmod, group_divmod, last_heads_divmod, q_heads_divmod;
};

/// last_tiles: tiles at the end that are sorted by length.
constexpr TileScheduler make_tile_scheduler(std::int32_t batch, std::int32_t q_heads,
                                            std::int32_t group, std::int32_t q_tiles,
                                            std::int32_t last_tiles) {
  const std::int32_t groups = batch * q_heads / group;
  const std::int32_t group_tiles = group * q_tiles;
  const std::int32_t last = (last_tiles + group_tiles - 1) / (group_tiles > 0 ? group_tiles : 1);
  const std::int32_t last_groups = last < groups ? last : groups;
  return {groups * group_tiles,
          q_tiles,
          group,
          groups - last_groups,
          make_fast_divmod(group_tiles),
          make_fast_divmod(group),
          make_fast_divmod(last_groups * group),
          make_fast_divmod(q_heads)};
}

FLASHCORE_HD constexpr TileCoord coord_of(const TileScheduler& order, std::int32_t index) {
  const DivmodResult of_group = divmod(index, order.group_tiles_divmod);
  const bool whole = of_group.quotient < order.whole_groups;
  const std::int32_t groups_before = whole ? of_group.quotient : order.whole_groups;
  const std::int32_t rest =
      index - groups_before * static_cast<std::int32_t>(order.group_tiles_divmod.value);
  const DivmodResult of_tile = divmod(rest, whole ? order.group_divmod : order.last_heads_divmod);
  const DivmodResult of_head =
      divmod(groups_before * order.group + of_tile.remainder, order.q_heads_divmod);
  return {of_head.quotient, of_head.remainder, order.q_tiles - 1 - of_tile.quotient};
}

/// The tiles of the last partial wave, each split along the keys as in stream-K. Without it, a last
/// wave of a few equally long tiles would leave most SMs idle.
struct TailSplit {
  std::int32_t first;     // first tile that is split
  std::int32_t kv_tiles;  // KV tiles of a split; the last split may have fewer
  FastDivmod splits_divmod;

  FLASHCORE_HD constexpr std::int32_t splits() const {
    return static_cast<std::int32_t>(splits_divmod.value);
  }
};

/// A whole tile or one split of a tail tile.
struct ScheduledTile {
  std::int32_t tile;
  std::int32_t split;  // -1: the whole tile
};

constexpr std::int32_t num_scheduled(const TileScheduler& order, const TailSplit& tail) {
  return tail.first + (order.tiles - tail.first) * tail.splits();
}

FLASHCORE_HD constexpr ScheduledTile scheduled_tile(const TailSplit& tail, std::int32_t index) {
  if (index < tail.first) return {index, -1};
  const DivmodResult of_tile = divmod(index - tail.first, tail.splits_divmod);
  return {tail.first + of_tile.quotient, of_tile.remainder};
}

}  // namespace flashcore::core
