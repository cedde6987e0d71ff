// core/scratch.h: the parts of a thread's scratch memory must not overlap.
#include "core/scratch.h"

#include <gtest/gtest.h>

#include <utility>

#include "plan/model/model.h"

namespace flashcore::core {
namespace {

void expect_disjoint(CpuOperands operands, std::int64_t tile_q, std::int64_t tile_k,
                     std::int64_t head_dim, std::int64_t v_dim) {
  const ScratchLayout s = scratch_layout(operands, tile_q, tile_k, head_dim, v_dim);
  // Sizes in elements of 4 or 8 bytes; a bf16 part needs half of one.
  const int operand_parts = core::operand_parts(operands), p_parts = weight_parts(operands);
  head_dim = padded_dim(operands, head_dim), v_dim = padded_dim(operands, v_dim);
  const auto operand = [&](std::int64_t elements) {
    return operand_parts == 0 ? elements : (elements * operand_parts + 1) / 2;
  };
  const std::pair<std::int64_t, std::int64_t> parts[] = {
      {s.q_tile, operand(head_dim * tile_q)},
      {s.k_tile, operand(tile_k * head_dim)},
      {s.v_tile, operand(tile_k * v_dim)},
      {s.scores, tile_k * tile_q},
      {s.p_tile, (tile_k * tile_q * p_parts + 1) / 2},  // without parts P replaces the scores
      {s.out_tile, v_dim * tile_q},
      {s.max, tile_q},
      {s.sum, tile_q}};
  for (const auto& a : parts) {
    ASSERT_EQ(a.first % 64, 0);  // whole cache lines, aligned for all vector types
    ASSERT_GE(a.first, 0);
    ASSERT_LE(a.first + a.second, s.total);
    for (const auto& b : parts) {
      if (&a == &b || a.second == 0 || b.second == 0) continue;
      ASSERT_TRUE(a.first + a.second <= b.first || b.first + b.second <= a.first);
    }
  }
  ASSERT_EQ(s.total % 64, 0);
}

TEST(Scratch, PartsAreDisjointAndInsideForEveryTuningRow) {
  for (const Isa isa : {Isa::generic, Isa::neon, Isa::avx2, Isa::avx512, Isa::vnni, Isa::amx}) {
    for (const CpuTuningRow& row : cpu_tuning(isa)) {
      for (const std::int64_t d : {std::int64_t{1}, std::int64_t{63}, std::int64_t{row.max_dim}}) {
        for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
          expect_disjoint(cpu_operands(isa, dtype), 64, row.tile_k, d, row.max_dim);
          expect_disjoint(cpu_operands(isa, dtype), 64, row.tile_k, row.max_dim, d);
        }
      }
    }
  }
}

TEST(Scratch, Bf16TilesHavePaddedDims) {
  EXPECT_EQ(padded_dim(CpuOperands::compute, 33), 33);
  EXPECT_EQ(padded_dim(CpuOperands::bf16_tiles, 1), 32);
  EXPECT_EQ(padded_dim(CpuOperands::bf16_tiles, 64), 64);
  EXPECT_EQ(padded_dim(CpuOperands::bf16_tiles, 65), 96);
}

TEST(Scratch, PartsAreDisjointForOddSizes) {
  for (std::int64_t tile_q : {1, 7, 64}) {
    for (std::int64_t tile_k : {1, 5, 12, 128}) {
      for (std::int64_t dim : {1, 2, 65, 576}) {
        expect_disjoint(CpuOperands::compute, tile_q, tile_k, dim, 577 - dim);
        expect_disjoint(CpuOperands::bf16_tiles, tile_q, tile_k, dim, 577 - dim);
        expect_disjoint(CpuOperands::two_bf16_tiles, tile_q, tile_k, dim, 577 - dim);
        expect_disjoint(CpuOperands::three_bf16_tiles, tile_q, tile_k, dim, 577 - dim);
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::core
