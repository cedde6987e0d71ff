// Layout of the scratch memory of the CPU kernels for gradients. The planner reads its size, the
// kernels its offsets.
#pragma once

#include <cstdint>

#include "core/config.h"

namespace flashcore::core {

/// Query rows of a work tile of the CPU kernels: a multiple of every vector.
inline constexpr std::int32_t kBackwardTileQ = 64;

/// KV tiles whose K, V, dk and dv a thread keeps at a time: q and dout are loaded once for all of
/// them.
inline constexpr std::int32_t kBackwardBlockTiles = 4;

/// Scratch memory of a CPU thread, with block_k = tile_k * kBackwardBlockTiles: offsets in elements
/// of the compute type, multiples of 64. Rows of q, dout and of the accumulators are padded to
/// whole vectors.
struct BackwardScratch {
  std::int64_t q_rows;   // [tile_q, padded head_dim], finite
  std::int64_t q_cols;   // [head_dim, tile_q], scaled
  std::int64_t do_rows;  // [tile_q, padded v_dim], finite
  std::int64_t do_cols;  // [v_dim, tile_q]
  std::int64_t k_tile;   // [block_k, head_dim]
  std::int64_t v_tile;   // [block_k, v_dim]
  std::int64_t p;        // [tile_k, tile_q]: scores, then P
  std::int64_t ds;       // [tile_k, tile_q]: dP, then dS or dZ
  std::int64_t slope;    // [tile_k, tile_q]: derivative of the softcap
  std::int64_t k_clean;  // [block_k, head_dim]: K with 0 in place of numbers that are not finite
  std::int64_t dk;       // [block_k, padded head_dim]; dbias: [tile_q, tile_k]
  std::int64_t dv;       // [block_k, padded v_dim]
  std::int64_t base, factor, delta, poison;  // [tile_q]
  std::int64_t total;
};

/// The longest row of a vectorised operand: whole vectors of 64 bytes.
FLASHCORE_HD constexpr std::int64_t padded_row(std::int64_t columns) {
  return (columns + 15) / 16 * 16;
}

FLASHCORE_HD constexpr BackwardScratch backward_scratch(std::int64_t tile_q, std::int64_t tile_k,
                                                        std::int64_t head_dim, std::int64_t v_dim) {
  BackwardScratch s{};
  std::int64_t end = 0;
  const auto place = [&end](std::int64_t elements) {
    const std::int64_t begin = end;
    end += (elements + 63) / 64 * 64;
    return begin;
  };
  const std::int64_t q_row = padded_row(head_dim), v_row = padded_row(v_dim);
  const std::int64_t block_k = tile_k * kBackwardBlockTiles;
  s.q_rows = place(tile_q * q_row);
  s.q_cols = place(head_dim * tile_q);
  s.do_rows = place(tile_q * v_row);
  s.do_cols = place(v_dim * tile_q);
  s.k_tile = place(block_k * head_dim);
  s.v_tile = place(block_k * v_dim);
  s.p = place(tile_k * tile_q);
  s.ds = place(tile_k * tile_q);
  s.slope = place(tile_k * tile_q);
  s.k_clean = place(block_k * head_dim);
  s.dk = place(block_k * (q_row > tile_q ? q_row : tile_q));
  s.dv = place(block_k * v_row);
  s.base = place(tile_q);
  s.factor = place(tile_q);
  s.delta = place(tile_q);
  s.poison = place(tile_q);
  s.total = end;
  return s;
}

}  // namespace flashcore::core
