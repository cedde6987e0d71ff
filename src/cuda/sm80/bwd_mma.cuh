// The products of gradients by mma.sync. Both kinds read all operands from shared memory.
#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/memory.cuh"
#include "cuda/primitives/mma.cuh"
#include "cuda/sm80/bwd_config.cuh"

namespace flashcore::cuda::sm80 {

/// pairs = A Bᵀ: [pair_rows, pair_columns] = [pair_rows, head_dim] x [pair_columns, head_dim]ᵀ.
template <typename C>
__device__ __forceinline__ void multiply_rows(AccPairs<C>& pairs, const typename C::Element* s_a,
                                              const typename C::Element* s_b,
                                              const BwdThread<C>& t) {
  using T = typename C::Element;
  using TileA = typename C::TileA;
  using TileB = typename C::TileB;
  const core::Coordinate at_a = core::ldmatrix_a(t.lane), at_b = core::ldmatrix_b(t.lane);
  const std::uint32_t s_rows_a =
      shared_address(s_a) + TileA::offset(t.pair_row0() + at_a.row, at_a.column);
  const std::uint32_t s_rows_b =
      shared_address(s_b) + TileB::offset(t.pair_column0() + at_b.row, at_b.column);
#pragma unroll
  for (int m = 0; m < C::kPairRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kPairColumnTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[m][n][i] = 0.f;
    }
  }
#pragma unroll(4)
  for (int i = 0; i < C::kGemmSteps; ++i) {
    std::uint32_t a[C::kPairRowTiles][4];
#pragma unroll
    for (int m = 0; m < C::kPairRowTiles; ++m) {
      ldmatrix_x4(a[m], TileA::advance_rows8(TileA::advance_k(s_rows_a, i), 2 * m));
    }
#pragma unroll
    for (int n = 0; n < C::kPairColumnTiles; n += 2) {
      std::uint32_t b[4];
      ldmatrix_x4(b, TileB::advance_rows8(TileB::advance_k(s_rows_b, i), n));
#pragma unroll
      for (int m = 0; m < C::kPairRowTiles; ++m) {
        mma_m16n8k16<T>(pairs[m][n], a[m], b[0], b[1]);
        mma_m16n8k16<T>(pairs[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

/// acc += W B: [tile, head_dim] += [tile, step] x [step, head_dim], a warp's rows and columns.
template <typename C>
__device__ __forceinline__ void multiply_weights(AccGradient<C>& acc,
                                                 const typename C::Element* s_weights,
                                                 const typename C::Element* s_b,
                                                 const BwdThread<C>& t) {
  using T = typename C::Element;
  using Weights = typename C::Weights;
  using TileB = typename C::TileB;
  const core::Coordinate at_w = core::ldmatrix_a(t.lane), at_b = core::ldmatrix_b_trans(t.lane);
  const std::uint32_t s_w =
      shared_address(s_weights) + Weights::offset(t.row0() + at_w.row, at_w.column);
  // A panel has a multiple of kColumnWarps groups of 16 columns: the warp's first one is an XOR.
  const std::uint32_t s_rows =
      TileB::advance_k(shared_address(s_b) + TileB::offset(at_b.row, at_b.column), t.column_warp());
#pragma unroll
  for (int step = 0; step < C::kStep / 16; ++step) {
    std::uint32_t w[C::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      ldmatrix_x4(w[m], Weights::advance_rows8(Weights::advance_k(s_w, step), 2 * m));
    }
#pragma unroll
    for (int group = 0; group < C::kGroups; ++group) {
      std::uint32_t b[4];
      ldmatrix_x4_trans(
          b, TileB::advance_rows8(TileB::advance_k(s_rows, C::kColumnWarps * group), 2 * step));
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        mma_m16n8k16<T>(acc[m][group][0], w[m], b[0], b[1]);
        mma_m16n8k16<T>(acc[m][group][1], w[m], b[2], b[3]);
      }
    }
  }
}

/// Stores a part of the thread's pairs, rounded to 16 bits, as weights [tile, step]: column tile
/// `part` or row tile `part`.
template <typename C, bool kColumns>
__device__ __forceinline__ void store_weights(typename C::Element* s_weights,
                                              const AccPairs<C>& pairs, const BwdThread<C>& t,
                                              int part) {
  using Weights = typename C::Weights;
#pragma unroll
  for (int i = 0; i < (kColumns ? C::kPairRowTiles : C::kPairColumnTiles); ++i) {
    const int m = kColumns ? i : part, n = kColumns ? part : i;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = t.pair_row(m, half), column = t.pair_column(n, 0);
      store_shared_4(
          shared_address(s_weights) + Weights::offset(row, column / 8) + 2 * (column % 8),
          pack<typename C::Element>(pairs[m][n][2 * half], pairs[m][n][2 * half + 1]));
    }
  }
}

}  // namespace flashcore::cuda::sm80
