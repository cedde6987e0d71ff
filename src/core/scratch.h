// Layout of the CPU kernel's scratch memory. The planner reads its size, the kernel its offsets.
#pragma once

#include <cstdint>

#include "core/config.h"

namespace flashcore::core {

/// Offsets in elements of the compute type, each a multiple of 64.
struct ScratchLayout {
  std::int64_t q_tile;    // [head_dim, tile_q] in panels of rows (cpu/kernels/load-inl.h)
  std::int64_t k_tile;    // [tile_k, head_dim]
  std::int64_t v_tile;    // [tile_k, v_dim]
  std::int64_t scores;    // [tile_k, rows of one panel]
  std::int64_t out_tile;  // [v_dim, tile_q] in panels of rows
  std::int64_t max;       // [tile_q]
  std::int64_t sum;       // [tile_q]
  std::int64_t total;
};

FLASHCORE_HD constexpr ScratchLayout scratch_layout(std::int64_t tile_q, std::int64_t tile_k,
                                                    std::int64_t head_dim, std::int64_t v_dim) {
  const auto padded = [](std::int64_t elements) { return (elements + 63) / 64 * 64; };
  ScratchLayout layout{};
  layout.q_tile = 0;
  layout.k_tile = layout.q_tile + padded(head_dim * tile_q);
  layout.v_tile = layout.k_tile + padded(tile_k * head_dim);
  layout.scores = layout.v_tile + padded(tile_k * v_dim);
  layout.out_tile = layout.scores + padded(tile_k * tile_q);
  layout.max = layout.out_tile + padded(v_dim * tile_q);
  layout.sum = layout.max + padded(tile_q);
  layout.total = layout.sum + padded(tile_q);
  return layout;
}

}  // namespace flashcore::core
