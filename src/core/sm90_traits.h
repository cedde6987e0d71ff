// The shape of a Hopper kernel and the order of its work: for the kernel, and for the planner,
// which needs no CUDA.
#pragma once

#include <cstdint>

#include "core/fast_divmod.h"

namespace flashcore::core {

inline constexpr int kSm90SharedBytes = 227 * 1024;  // that a block may have
inline constexpr int kSm90MaxHeadDim = 256;
inline constexpr int kQTileRows = 64;
inline constexpr int kWarpRows = 16;

struct Sm90Traits {
  int head_dim;  // head_dim and v_dim at most
  int tile_q;    // 64 rows for each warpgroup that computes
  int tile_k;
  int stages;  // steps whose K and V are under way or there
  int element_bytes = 2;

  constexpr bool is_fp8() const { return element_bytes == 1; }
  constexpr int consumers() const { return tile_q / kQTileRows; }
  constexpr int threads() const { return 128 * (1 + consumers()); }
  /// Bytes of rows of Q, K or V, in panels of 128 bytes.
  constexpr int tile_bytes(int rows) const {
    return rows * 128 * ((head_dim * element_bytes + 127) / 128);
  }
  /// 8-bit values come as they are, and are then transposed into stages of their own.
  constexpr int v_staging_stages() const { return is_fp8() ? 2 : 0; }
  constexpr int transposed_bytes() const { return head_dim * 128 * ((tile_k + 127) / 128); }
  /// Of the rings of K and V.
  constexpr int key_bytes() const {
    return stages * (tile_bytes(tile_k) + (is_fp8() ? transposed_bytes() : tile_bytes(tile_k))) +
           v_staging_stages() * tile_bytes(tile_k);
  }
  /// Queries lie in pieces of 64 rows, one for each warpgroup that computes. Places for more than
  /// an item's, where there is room, hide the time until the next item's queries are there.
  constexpr int q_stages() const {
    constexpr int kOther = 2048;  // barriers and items
    const int fit = (kSm90SharedBytes - kOther - key_bytes()) / tile_bytes(kQTileRows);
    return fit < 2 * consumers() ? fit : 2 * consumers();
  }
  /// How many of them come together. Where there is no room for two items' queries, each piece
  /// comes by itself, as soon as some warpgroup is done with what was in its place; but warpgroups
  /// that compute on codes do not run ahead into the next item, and gain nothing by that.
  constexpr int q_tiles_per_stage() const {
    return is_fp8() || q_stages() == 2 * consumers() ? consumers() : 1;
  }
  /// Barriers of pieces that come together, or of each warpgroup's pieces: see QStage.
  constexpr int q_barriers() const {
    return q_tiles_per_stage() > 1 ? q_stages() / q_tiles_per_stage() : 2 * consumers();
  }
  /// Consumers of e4m3 at head_dim 256 issue Q K^T of the next step at the end of this one.
  constexpr bool scores_ahead() const { return is_fp8() && head_dim == 256; }
  /// Warps that transpose 8-bit values.
  constexpr int transposers() const { return is_fp8() ? 2 : 0; }
  /// Whether tiles may have rows of several heads that share K and V, and keys of an item may be
  /// cut into parts: of one kernel, since what that takes would cost the others time.
  constexpr bool packs_gqa() const { return !is_fp8() && head_dim == 128 && tile_k == 160; }
  /// What a part leaves in the workspace: its output in f32, and two numbers for each row.
  constexpr int part_bytes() const { return tile_q * (head_dim + 2) * 4; }
  /// Of a thread that computes; the warpgroup that only loads gives its own away.
  constexpr int consumer_registers() const { return consumers() == 3 ? 160 : 232; }
  constexpr int producer_registers() const { return consumers() == 3 ? 32 : 40; }
};

/// Where a warpgroup's queries of an item are. Pieces go round through their places.
///
/// Pieces that come together share a barrier, which goes round with them. For pieces that come one
/// by one, each warpgroup has two barriers of its own and uses them in turns. It then waits for
/// every phase of its barriers. At a barrier shared among warpgroups, one that is an item ahead
/// could take an early phase for its own: a wait compares parities only.
template <int kConsumers, int kPlaces, int kTogether>
struct QStage {
  static constexpr int kOwnBarriers = 2;
  static constexpr int kBarriers = kTogether == 1 ? kConsumers * kOwnBarriers : kPlaces / kTogether;
  static_assert(kTogether == 1 || (kTogether == kConsumers && kPlaces % kConsumers == 0));
  static_assert(kPlaces >= kConsumers && kPlaces <= kOwnBarriers * kConsumers);
  std::uint32_t item;  // counted from the block's first
  std::int32_t group;

  /// Its barriers, and how often they have been used before.
  FLASHCORE_HD constexpr std::uint32_t stage() const {
    return kTogether > 1 ? item % kBarriers
                         : static_cast<std::uint32_t>(group) * kOwnBarriers + item % kOwnBarriers;
  }
  FLASHCORE_HD constexpr std::uint32_t round() const {
    return item / (kTogether > 1 ? kBarriers : kOwnBarriers);
  }
  /// The place in shared memory.
  FLASHCORE_HD constexpr std::uint32_t place() const {
    return kTogether > 1 ? stage() * kTogether + static_cast<std::uint32_t>(group)
                         : turn() % kPlaces;
  }

  /// The wait before the place is filled: it ends when the piece that was there has been released.
  struct Emptied {
    std::uint32_t barrier, times;
    FLASHCORE_HD constexpr std::uint32_t stage() const { return barrier; }
    FLASHCORE_HD constexpr std::uint32_t round() const { return times; }
  };
  FLASHCORE_HD constexpr Emptied emptied() const {
    if (kTogether > 1 || turn() < kPlaces) return {stage(), round()};
    const std::uint32_t before = turn() - kPlaces;
    const QStage piece{before / kConsumers, static_cast<std::int32_t>(before % kConsumers)};
    return {piece.stage(), piece.round() + 1};
  }

 private:
  FLASHCORE_HD constexpr std::uint32_t turn() const {
    return item * kConsumers + static_cast<std::uint32_t>(group);
  }
};

inline constexpr int kMaxHeadsInTile = kQTileRows / kWarpRows;  // a warp's rows are of one

/// How the rows of a tile are dealt out among heads that share K and V, a power of two of them: a
/// piece has as many queries of each, one head after the other. The rows of a tile are then closer
/// to each other under a causal mask, and fewer of its keys are hidden from some of them.
struct PackGqa {
  std::int32_t log2;

  /// Of each head in a piece.
  FLASHCORE_HD constexpr std::int32_t queries() const { return kQTileRows >> log2; }
  FLASHCORE_HD constexpr std::int32_t head(std::int32_t row) const {
    return (row % kQTileRows << log2) / kQTileRows;
  }
  FLASHCORE_HD constexpr std::int32_t query(std::int32_t row) const {
    return row / kQTileRows * queries() + (row & (queries() - 1));
  }
};

/// In which order the tiles of query rows are worked on. The heads that share K and V follow each
/// other, and their tiles, so that blocks side by side read the same keys at the same time: the L2
/// cache serves that far better than blocks that are elsewhere. Within these heads, and among the
/// last heads of all together, the last tiles come first: under a causal mask they are the longest,
/// and what is long must not begin when the others end.
struct TileScheduler {
  std::int32_t items;
  std::int32_t q_tiles;
  std::int32_t group;         // heads that share K and V
  std::int32_t whole_groups;  // that come one after the other; the other heads come together
  FastDivmod group_tiles_divmod, group_divmod, last_heads_divmod, q_heads_divmod;
};

/// last_items: how many of the items, at the end, should be in the order of their length.
constexpr TileScheduler make_tile_scheduler(std::int32_t batch, std::int32_t q_heads,
                                            std::int32_t group, std::int32_t q_tiles,
                                            std::int32_t last_items) {
  const std::int32_t groups = batch * q_heads / group;
  const std::int32_t group_items = group * q_tiles;
  const std::int32_t last = (last_items + group_items - 1) / (group_items > 0 ? group_items : 1);
  const std::int32_t last_groups = last < groups ? last : groups;
  return {groups * group_items,
          q_tiles,
          group,
          groups - last_groups,
          make_fast_divmod(group_items),
          make_fast_divmod(group),
          make_fast_divmod(last_groups * group),
          make_fast_divmod(q_heads)};
}

/// The items at the end whose keys are cut into parts, which are worked on as if they were items:
/// where all are equally long, a last round of a few of them would leave most SMs idle.
struct Tail {
  std::int32_t first;       // of the items that are cut
  std::int32_t part_tiles;  // tiles of keys of a part; the last one may have fewer
  FastDivmod splits_divmod;

  FLASHCORE_HD constexpr std::int32_t parts() const {
    return static_cast<std::int32_t>(splits_divmod.value);
  }
};

/// How many pieces of work there are.
constexpr std::int32_t num_scheduled(const TileScheduler& order, const Tail& tail) {
  return tail.first + (order.items - tail.first) * tail.parts();
}

struct ScheduledTile {
  std::int32_t item;
  std::int32_t part;  // -1: it is the whole item
};

FLASHCORE_HD constexpr ScheduledTile scheduled_tile(const Tail& tail, std::int32_t index) {
  if (index < tail.first) return {index, -1};
  const DivmodResult of_item = divmod(index - tail.first, tail.splits_divmod);
  return {tail.first + of_item.quotient, of_item.remainder};
}

struct TileCoord {
  std::int32_t batch, head, q_tile;
};

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

}  // namespace flashcore::core
