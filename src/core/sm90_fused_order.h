// The order of a fused kernel's work tiles, and of the additions to a dQ tile.
//
// CTAs take tickets from a counter. Inside a head, key tiles ascend with the ticket, and a dQ tile
// takes the tiles of its keys in ascending order. So a work tile waits for smaller tickets only,
// which running CTAs hold: it cannot deadlock, however few CTAs are resident.
#pragma once

#include <cstdint>

#include "core/fast_divmod.h"
#include "core/mask.h"
#include "core/sm90_fused_traits.h"

namespace flashcore::core {

/// dQ sums of this size stay in an L2 cache of 50 MB beside the operands.
inline constexpr std::int64_t kDqBytesInL2 = 32 << 20;

/// KV heads of a section, if the dQ sums of one that are in use have `bytes`. Its work tiles begin
/// with the first key tile of every head: CTAs that add to the dQ tiles of one head follow each
/// other, fewer of them if a section has more heads. The sums should stay in L2. But a section
/// needs two work tiles for each SM, because with a causal mask the tiles of a head differ in
/// length.
constexpr std::int32_t fused_section_heads(std::int64_t bytes, std::int32_t key_tiles) {
  constexpr std::int64_t kMost = 8;
  constexpr std::int32_t kTiles = 256;
  const std::int64_t fit = kDqBytesInL2 / (bytes > 0 ? bytes : 1);
  const auto in_l2 = static_cast<std::int32_t>(fit < 1 ? 1 : fit < kMost ? fit : kMost);
  const std::int32_t least = key_tiles > 0 ? (kTiles + key_tiles - 1) / key_tiles : 1;
  return in_l2 > least ? in_l2 : least;
}

struct FusedCoord {
  std::int32_t batch, head, key_tile;
};

/// Sections of (batch, KV head) pairs; the last one may have fewer.
struct FusedOrder {
  std::int32_t tiles;          // work tiles
  std::int32_t section_heads;  // of a whole section
  std::int32_t whole_sections;
  FastDivmod section_divmod, heads_divmod, last_heads_divmod, kv_heads_divmod;
};

constexpr FusedOrder make_fused_order(std::int32_t batch, std::int32_t kv_heads,
                                      std::int32_t key_tiles, std::int32_t section_heads) {
  const std::int32_t heads = batch * kv_heads;
  return {heads * key_tiles,
          section_heads,
          heads / section_heads,
          make_fast_divmod(section_heads * key_tiles),
          make_fast_divmod(section_heads),
          make_fast_divmod(heads % section_heads),
          make_fast_divmod(kv_heads)};
}

FLASHCORE_HD constexpr FusedCoord coord_of(const FusedOrder& order, std::int32_t ticket) {
  const DivmodResult section = divmod(ticket, order.section_divmod);
  const bool whole = section.quotient < order.whole_sections;
  const DivmodResult tile =
      divmod(section.remainder, whole ? order.heads_divmod : order.last_heads_divmod);
  const DivmodResult head =
      divmod(section.quotient * order.section_heads + tile.remainder, order.kv_heads_divmod);
  return {head.quotient, head.remainder, tile.quotient};
}

/// The keys that some query of dQ tile `tile` sees.
FLASHCORE_HD KeyRange keys_of_dq_tile(Mask mask, std::int32_t q_len, std::int32_t tile) {
  mask.fault = {};  // the ranges of the steps have none either
  const std::int32_t first = tile * kFusedStepRows, end = first + kFusedStepRows;
  return keys_seen_by_any(mask, first, (end < q_len ? end : q_len) - 1);
}

/// Additions to a dQ tile before that of key tile `key_tile`, which sees some of its queries.
FLASHCORE_HD std::uint32_t turn_of(const Mask& mask, std::int32_t q_len, std::int32_t tile,
                                   std::int32_t key_tile) {
  const std::int32_t first = keys_of_dq_tile(mask, q_len, tile).begin / kFusedTileRows;
  return static_cast<std::uint32_t>(key_tile - first);
}

}  // namespace flashcore::core
