// The KV tiles of a Hopper work tile, and the share of them that each warpgroup reads.
#pragma once

#include "core/mask.h"
#include "core/sm90_pipeline.h"

namespace flashcore::core {

inline constexpr int kMaxConsumers = 3;

struct TileSteps {
  std::int32_t queries;     // of each head; < 0: end of the queue
  std::int32_t first_tile;  // first KV tile
  std::int32_t tiles;       // KV tiles, at least one
  // Per warpgroup:
  KeyRange unmasked_tiles[kMaxConsumers];  // KV tiles fully visible to all its rows
  std::int32_t kv_tiles[kMaxConsumers];    // KV tiles visible to some of its rows
  bool skips_last_tile[kMaxConsumers];     // the last KV tile is visible to other warpgroups only
};

/// The range of a tail split; split < 0: the whole tile.
struct TailRange {
  std::int32_t split = -1;
  std::int32_t kv_tiles = 0;  // of each split; the last one may have fewer
};

inline constexpr KeyRange kAllKeys{0, 0x7fffffff};

/// Finds the KV tiles of work.queries queries from `first` on, rows_each of each head in a
/// warpgroup. `limit` contains every key that a boolean mask leaves visible. Writes field by field
/// and reads the mask again for each, because the scheduler thread has few registers.
FLASHCORE_HD void find_kv_tiles(TileSteps& work, const Mask& mask, std::int32_t first,
                                std::int32_t rows_each, TailRange range, int consumers, int tile_k,
                                KeyRange limit = kAllKeys) {
  const auto opaque = [] { asm volatile("" ::: "memory"); };
  const std::int32_t queries = work.queries;
  opaque();
  const std::int32_t seen_begin = visible_keys(mask, first).begin;
  const std::int32_t begin = seen_begin > limit.begin ? seen_begin : limit.begin;
  work.first_tile = begin / tile_k;
  opaque();
  const std::int32_t seen_end = visible_keys(mask, first + (queries > 1 ? queries : 1) - 1).end;
  const std::int32_t end = seen_end < limit.end ? seen_end : limit.end;
  work.tiles = (end - 1) / tile_k + 1 - work.first_tile;
  // A tile without keys has one fully masked step: see kTileSlots.
  if (end <= begin) {
    work.first_tile = 0;
    work.tiles = 1;
  }
  if (range.split >= 0) {
    const std::int32_t before = range.split * range.kv_tiles;
    const std::int32_t rest = work.tiles - before;
    work.first_tile += before;
    work.tiles = rest < range.kv_tiles ? rest : range.kv_tiles;
  }
  FLASHCORE_LOOP
  for (int group = 0; group < consumers; ++group) {
    const std::int32_t own_first = first + rows_each * group;
    const std::int32_t own_end =
        own_first + rows_each < first + queries ? own_first + rows_each : first + queries;
    const KeyRange of_first = visible_keys(mask, own_first);
    const KeyRange of_last =
        visible_keys(mask, (own_end > own_first + 1 ? own_end : own_first + 1) - 1);
    work.unmasked_tiles[group] = {(of_last.begin + tile_k - 1) / tile_k, of_first.end / tile_k};
    // Every warpgroup takes at least one step, and skips one KV tile at most.
    const std::int32_t own = (of_last.end + tile_k - 1) / tile_k - work.first_tile;
    const std::int32_t most = own < work.tiles ? own : work.tiles;
    const std::int32_t least = work.tiles - 1 > 1 ? work.tiles - 1 : 1;
    work.kv_tiles[group] = most > least ? most : least;
    work.skips_last_tile[group] = work.kv_tiles[group] < work.tiles;
  }
}

}  // namespace flashcore::core
