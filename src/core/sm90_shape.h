// The shape of a Hopper kernel and the order of its work: for the kernel, and for the planner, which
// needs no CUDA.
#pragma once

#include <cstdint>

#include "core/divisor.h"

namespace flashcore::core {

struct Sm90Shape {
  int head_dim;  // head_dim and v_dim at most
  int tile_q;    // 64 rows for each warpgroup that computes
  int tile_k;
  int stages;  // steps whose K and V are under way or there

  constexpr int consumers() const { return tile_q / 64; }
  constexpr int threads() const { return 128 * (1 + consumers()); }
  /// Of a thread that computes; the warpgroup that only loads gives its own away.
  constexpr int consumer_registers() const { return consumers() == 2 ? 232 : 160; }
  constexpr int producer_registers() const { return consumers() == 2 ? 40 : 32; }
};

/// In which order the tiles of query rows are worked on: heads in sections whose K and V stay in the
/// L2 cache together; in a section the last tiles of all heads come first, because under a causal
/// mask they have most keys, and what is long should not begin last.
struct WorkOrder {
  std::int32_t items;
  std::int32_t q_tiles;
  std::int32_t section_heads;   // of batch * q_heads
  std::int32_t whole_sections;  // the one after them, if any, has fewer heads
  Divisor by_section_items, by_section_heads, by_last_heads, by_q_heads;
};

/// How many query heads share the L2 cache, of which half is left to the rest: head_bytes of K and V
/// serve `group` of them.
constexpr std::int32_t section_heads(std::int64_t l2_bytes, std::int64_t head_bytes,
                                     std::int32_t group) {
  const std::int64_t fit = head_bytes == 0 ? 1 : l2_bytes / 2 / head_bytes;
  const std::int64_t heads = (fit < 1 ? 1 : fit > 4096 ? 4096 : fit) * group;
  return static_cast<std::int32_t>(heads);
}

constexpr WorkOrder make_work_order(std::int32_t batch, std::int32_t q_heads, std::int32_t q_tiles,
                                    std::int32_t section_heads) {
  const std::int32_t heads = batch * q_heads;
  const std::int32_t section = section_heads < heads ? section_heads : heads > 0 ? heads : 1;
  const std::int32_t whole = heads / section;
  return {heads * q_tiles,
          q_tiles,
          section,
          whole,
          make_divisor(section * q_tiles),
          make_divisor(section),
          make_divisor(heads - whole * section),
          make_divisor(q_heads)};
}

struct WorkItem {
  std::int32_t batch, head, q_tile;
};

FLASHCORE_HD constexpr WorkItem work_item(const WorkOrder& order, std::int32_t index) {
  const Division section = divide_with_remainder(index, order.by_section_items);
  const Division in_section = divide_with_remainder(
      section.remainder,
      section.quotient < order.whole_sections ? order.by_section_heads : order.by_last_heads);
  const Division of_head = divide_with_remainder(
      section.quotient * order.section_heads + in_section.remainder, order.by_q_heads);
  return {of_head.quotient, of_head.remainder, order.q_tiles - 1 - in_section.quotient};
}

}  // namespace flashcore::core
