// What a work item of a Hopper kernel asks of each role: which KV tiles there are, and which of
// them a warpgroup takes part in.
#pragma once

#include "core/mask.h"
#include "core/sm90_pipeline.h"

namespace flashcore::core {

inline constexpr int kMostConsumers = 3;

struct TileSteps {
  std::int32_t queries;     // of each head; < 0: there are no more items
  std::int32_t first_tile;  // of keys
  std::int32_t tiles;       // at least one
  // Of each warpgroup: the tiles of keys that all its rows see whole, how many tiles some of them
  // see, and whether that leaves one tile at the end for later rows only.
  KeyRange unmasked_tiles[kMostConsumers];
  std::int32_t kv_tiles[kMostConsumers];
  bool skips_last_tile[kMostConsumers];
};

/// The part of a tail-split item; part < 0: the item is whole.
struct TailPart {
  std::int32_t part = -1;
  std::int32_t tiles = 0;  // of each part; the last one may have fewer
};

/// Finds the steps of item.queries queries from `first` on, of one head or several, piece_queries
/// of each for a warpgroup. Writes field by field, and reads the mask anew: the scheduler has few
/// registers.
FLASHCORE_HD void find_kv_tiles(TileSteps& item, const Mask& mask, std::int32_t first,
                                std::int32_t piece_queries, TailPart part, int consumers,
                                int tile_k) {
  const auto opaque = [] { asm volatile("" ::: "memory"); };
  const std::int32_t queries = item.queries;
  opaque();
  const std::int32_t begin = visible_keys(mask, first).begin;
  item.first_tile = begin / tile_k;
  opaque();
  const std::int32_t end = visible_keys(mask, first + (queries > 1 ? queries : 1) - 1).end;
  item.tiles = (end - 1) / tile_k + 1 - item.first_tile;
  // An item without keys has one step all the same, whose scores are all hidden: see kTileSlots.
  if (end <= begin) {
    item.first_tile = 0;
    item.tiles = 1;
  }
  if (part.part >= 0) {
    const std::int32_t before = part.part * part.tiles;
    const std::int32_t rest = item.tiles - before;
    item.first_tile += before;
    item.tiles = rest < part.tiles ? rest : part.tiles;
  }
  FLASHCORE_LOOP
  for (int group = 0; group < consumers; ++group) {
    const std::int32_t own_first = first + piece_queries * group;
    const std::int32_t own_end =
        own_first + piece_queries < first + queries ? own_first + piece_queries : first + queries;
    const KeyRange of_first = visible_keys(mask, own_first);
    const KeyRange of_last =
        visible_keys(mask, (own_end > own_first + 1 ? own_end : own_first + 1) - 1);
    item.unmasked_tiles[group] = {(of_last.begin + tile_k - 1) / tile_k, of_first.end / tile_k};
    // At least one, so that it goes the way of the others; and it passes over one at most.
    const std::int32_t own = (of_last.end + tile_k - 1) / tile_k - item.first_tile;
    const std::int32_t most = own < item.tiles ? own : item.tiles;
    const std::int32_t least = item.tiles - 1 > 1 ? item.tiles - 1 : 1;
    item.kv_tiles[group] = most > least ? most : least;
    item.skips_last_tile[group] = item.kv_tiles[group] < item.tiles;
  }
}

}  // namespace flashcore::core
