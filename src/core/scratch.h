// Layout of the CPU kernel's scratch memory. The planner reads its size, the kernel its offsets.
#pragma once

#include <cstdint>

#include "core/config.h"

namespace flashcore::core {

/// Format of the packed operands of a CPU kernel.
enum class CpuOperands {
  compute,     // Q, K, V and P in the compute type, in their own dims; P replaces the scores
  bf16_tiles,  // bf16 matrix tiles; dims are multiples of kBf16TileDim, and P has its own memory
  two_bf16_tiles,    // the same, for numbers that are the sum of two bf16 parts
  three_bf16_tiles,  // of three
};

/// bf16 parts of Q, K and V; 0: they have the compute type.
FLASHCORE_HD constexpr int operand_parts(CpuOperands operands) {
  return operands == CpuOperands::compute          ? 0
         : operands == CpuOperands::bf16_tiles     ? 1
         : operands == CpuOperands::two_bf16_tiles ? 2
                                                   : 3;
}

/// bf16 parts of P. Where Q, K and V are sums of parts, P has all bits of f32.
FLASHCORE_HD constexpr int weight_parts(CpuOperands operands) {
  return operand_parts(operands) <= 1 ? operand_parts(operands) : 3;
}

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
  head_dim = padded_dim(operands, head_dim);
  v_dim = padded_dim(operands, v_dim);
  // Two bf16 parts fit in an element of the compute type.
  const auto size = [&](std::int64_t count, int parts) {
    return padded(parts == 0 ? count : (count * parts + 1) / 2);
  };
  const int parts = operand_parts(operands), p_parts = weight_parts(operands);
  ScratchLayout layout{};
  layout.q_tile = 0;
  layout.k_tile = layout.q_tile + size(head_dim * tile_q, parts);
  layout.v_tile = layout.k_tile + size(tile_k * head_dim, parts);
  layout.scores = layout.v_tile + size(tile_k * v_dim, parts);
  layout.p_tile = parts > 0 ? layout.scores + padded(tile_k * tile_q) : layout.scores;
  layout.out_tile = layout.p_tile + size(tile_k * tile_q, p_parts);
  layout.max = layout.out_tile + padded(v_dim * tile_q);
  layout.sum = layout.max + padded(tile_q);
  layout.total = layout.sum + padded(tile_q);
  return layout;
}

}  // namespace flashcore::core
