// Layout of the CPU kernel's scratch memory. The planner reads its size, the kernel its offsets.
#pragma once

#include <cstdint>

#include "core/config.h"

namespace flashcore::core {

/// Format of the packed operands of a CPU kernel.
enum class CpuOperands {
  compute,     // Q, K, V and P in the compute type, in their own dims; P replaces the scores
  bf16_tiles,  // bf16 matrix tiles; dims are multiples of kBf16TileDim, and P has its own memory
};

inline constexpr std::int64_t kBf16TileDim = 32;

/// tile_q of CPU kernels for few rows. Those of other kernels are larger.
inline constexpr std::int32_t kGemvRows = 16;

/// head_dim or v_dim of packed operands.
FLASHCORE_HD constexpr std::int64_t padded_dim(CpuOperands operands, std::int64_t dim) {
  if (operands == CpuOperands::compute) return dim;
  return (dim + kBf16TileDim - 1) / kBf16TileDim * kBf16TileDim;
}

/// Offsets in elements of the compute type, each a multiple of 64.
struct ScratchLayout {
  std::int64_t q_tile;    // [head_dim, tile_q] in panels of rows (cpu/kernels/load-inl.h)
  std::int64_t k_tile;    // [tile_k, head_dim]
  std::int64_t v_tile;    // [tile_k, v_dim]
  std::int64_t scores;    // [tile_k, rows of one panel]
  std::int64_t p_tile;    // [tile_k, rows of one panel] in bf16; otherwise the scores
  std::int64_t out_tile;  // [v_dim, tile_q] in panels of rows
  std::int64_t max;       // [tile_q]
  std::int64_t sum;       // [tile_q]
  std::int64_t total;
};

FLASHCORE_HD constexpr ScratchLayout scratch_layout(CpuOperands operands, std::int64_t tile_q,
                                                    std::int64_t tile_k, std::int64_t head_dim,
                                                    std::int64_t v_dim) {
  const auto padded = [](std::int64_t elements) { return (elements + 63) / 64 * 64; };
  const bool bf16 = operands == CpuOperands::bf16_tiles;
  head_dim = padded_dim(operands, head_dim);
  v_dim = padded_dim(operands, v_dim);
  // Two bf16 operands fit in an element of the compute type.
  const auto operand_size = [&](std::int64_t count) {
    return padded(bf16 ? (count + 1) / 2 : count);
  };
  ScratchLayout layout{};
  layout.q_tile = 0;
  layout.k_tile = layout.q_tile + operand_size(head_dim * tile_q);
  layout.v_tile = layout.k_tile + operand_size(tile_k * head_dim);
  layout.scores = layout.v_tile + operand_size(tile_k * v_dim);
  layout.p_tile = bf16 ? layout.scores + padded(tile_k * tile_q) : layout.scores;
  layout.out_tile = layout.p_tile + operand_size(tile_k * tile_q);
  layout.max = layout.out_tile + padded(v_dim * tile_q);
  layout.sum = layout.max + padded(tile_q);
  layout.total = layout.sum + padded(tile_q);
  return layout;
}

}  // namespace flashcore::core
