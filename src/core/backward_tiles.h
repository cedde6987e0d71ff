// Work tiles of the CUDA kernels for gradients. One grid computes all of them, in this order:
//
//   dkdv   (batch, KV head, KV tile): dk and dv of tile_k keys, over all query heads of the group
//   dq     (batch, query head, query tile): dq of tile_q rows
//   dbias  (batch, head, query tile, step of keys) of dbias: over the axes that the bias repeats
//   dk, dv a dkdv tile's results in two tiles: sm90 kernels of large head dims
//
// A work tile writes results that no other tile writes, so the order of tiles changes no bit.
#pragma once

#include "core/backward_params.h"
#include "core/backward_traits.h"
#include "core/mask.h"

namespace flashcore::core {

enum class BackwardOutput : std::int32_t { dkdv, dq, dbias, dk, dv };

/// The number of work tiles of each output.
struct BackwardGrid {
  std::int64_t dkdv, dq, dbias;
  FLASHCORE_HD std::int64_t total() const { return dkdv + dq + dbias; }
};

FLASHCORE_HD std::int64_t tiles_of(std::int64_t count, std::int64_t tile) {
  return (count + tile - 1) / tile;
}

FLASHCORE_HD BackwardGrid backward_grid(const BackwardParams& p) {
  const AttentionParams& f = p.fwd;
  const std::int64_t batch = f.batch;
  BackwardGrid grid{};
  if (p.dk != nullptr || p.dv != nullptr) grid.dkdv = batch * f.kv_heads * p.k_tiles;
  if (p.dq != nullptr) grid.dq = batch * f.q_heads * f.q_tiles;
  if (p.dbias != nullptr) {
    grid.dbias = static_cast<std::int64_t>(p.dbias_batch) * p.dbias_heads *
                 tiles_of(p.dbias_rows, f.tile_q) * tiles_of(f.kv_len, p.dbias_keys);
  }
  return grid;
}

/// A work tile. `head` is a KV head (dkdv), a query head (dq) or a head of dbias. `tile` counts KV
/// tiles (dkdv) or query tiles.
struct BackwardTile {
  BackwardOutput output;
  std::int32_t b, head, tile;
  std::int32_t first_key;  // dbias only
};

/// The queries that see some of `keys`, as [begin, end); empty if there are none. The inverse of
/// visible_keys(): the ends of its intervals never move left as the query index grows.
FLASHCORE_HD KeyRange queries_that_see(const Mask& mask, KeyRange keys, std::int32_t q_len) {
  const std::int32_t last_key =
      mask.kv_len - (mask.fault.is(InjectedFault::tail_key_dropped) ? 1 : 0);
  keys = intersect(keys, {0, last_key});
  if (keys.empty()) return {0, 0};
  std::int64_t begin = 0, end = q_len;
  if (mask.right >= 0) {
    const bool one_more = mask.fault.is(InjectedFault::causal_off_by_one);
    begin = max64(keys.begin - mask.right - mask.diagonal - (one_more ? 1 : 0), 0);
  }
  if (mask.left >= 0) {
    const bool one_less = mask.fault.is(InjectedFault::window_off_by_one);
    end = min64(keys.end + mask.left - mask.diagonal - (one_less ? 1 : 0), q_len);
  }
  if (begin >= end) return {0, 0};
  return {static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end)};
}

/// The queries that see all of `keys`, as [begin, end); empty if there are none.
FLASHCORE_HD KeyRange queries_that_see_all(const Mask& mask, KeyRange keys, std::int32_t q_len) {
  const std::int32_t last_key =
      mask.kv_len - (mask.fault.is(InjectedFault::tail_key_dropped) ? 1 : 0);
  if (keys.empty() || keys.begin < 0 || keys.end > last_key) return {0, 0};
  const KeyRange first = queries_that_see(mask, {keys.begin, keys.begin + 1}, q_len);
  const KeyRange last = queries_that_see(mask, {keys.end - 1, keys.end}, q_len);
  const KeyRange both = intersect(first, last);
  return both.empty() ? KeyRange{0, 0} : both;
}

/// KV tiles ascend and query tiles descend: with a causal mask the longest tiles come first.
FLASHCORE_HD BackwardTile backward_tile(const BackwardParams& p, const BackwardGrid& grid,
                                        std::int64_t index) {
  const AttentionParams& f = p.fwd;
  BackwardTile t{};
  const auto next = [&index](std::int64_t count) {
    const auto digit = static_cast<std::int32_t>(index % count);
    index /= count;
    return digit;
  };
  if (index < grid.dkdv) {
    t.output = BackwardOutput::dkdv;
    t.tile = next(p.k_tiles);
    t.head = next(f.kv_heads);
  } else if (index < grid.dkdv + grid.dq) {
    index -= grid.dkdv;
    t.output = BackwardOutput::dq;
    t.tile = f.q_tiles - 1 - next(f.q_tiles);
    t.head = next(f.q_heads);
  } else {
    index -= grid.dkdv + grid.dq;
    t.output = BackwardOutput::dbias;
    t.first_key = next(tiles_of(f.kv_len, p.dbias_keys)) * p.dbias_keys;
    t.tile = next(tiles_of(p.dbias_rows, f.tile_q));
    t.head = next(p.dbias_heads);
  }
  t.b = static_cast<std::int32_t>(index);
  return t;
}

}  // namespace flashcore::core
