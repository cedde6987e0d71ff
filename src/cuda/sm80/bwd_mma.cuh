// The products of gradients by mma.sync. Both kinds read all operands from shared memory.
#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/memory.cuh"
#include "cuda/primitives/mma.cuh"
#include "cuda/sm80/bwd_config.cuh"

namespace flashcore::cuda::sm80 {

/// Work to be done between the MMAs of a product: called with the index of each part, in order.
struct NoWork {
  __device__ __forceinline__ void operator()(int /*part*/) const {}
};

/// use(i) for the part of `count` items that falls to part `part` of `parts`.
template <int kCount, int kParts, typename Use>
__device__ __forceinline__ void for_part(int part, Use use) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i * kParts / kCount == part) use(i);
  }
}

/// pairs = A Bᵀ: [pair_rows, pair_columns] = [pair_rows, head_dim] x [pair_columns, head_dim]ᵀ.
/// between: kGemmSteps parts.
template <typename C, typename Work = NoWork>
__device__ __forceinline__ void multiply_rows(AccPairs<C>& pairs, const typename C::Element* s_a,
                                              const typename C::Element* s_b, const BwdThread<C>& t,
                                              Work between = {}) {
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
#pragma unroll
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
    between(i);
  }
}

/// acc += W B: [tile, head_dim] += [tile, step] x [step, head_dim], a warp's rows and columns.
/// between: kWeightParts parts.
template <typename C, typename Work = NoWork>
__device__ __forceinline__ void multiply_weights(AccGradient<C>& acc,
                                                 const typename C::Element* s_weights,
                                                 const typename C::Element* s_b,
                                                 const BwdThread<C>& t, Work between = {}) {
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
      between(step * C::kGroups + group);
    }
  }
}

/// The same with weights in registers: the pairs of the warp's rows, rounded to 16 bits. Columns
/// 16 i to 16 i + 15 of them are read before part kGroups i.
template <typename C, typename Work = NoWork>
__device__ __forceinline__ void multiply_pairs(AccGradient<C>& acc, const AccPairs<C>& weights,
                                               const typename C::Element* s_b,
                                               const BwdThread<C>& t, Work between = {}) {
  using T = typename C::Element;
  using TileB = typename C::TileB;
  static_assert(C::kWeightsInRegisters && C::kPairRowTiles == C::kRowTiles);
  const core::Coordinate at_b = core::ldmatrix_b_trans(t.lane);
  const std::uint32_t s_rows = shared_address(s_b) + TileB::offset(at_b.row, at_b.column);
#pragma unroll
  for (int step = 0; step < C::kStep / 16; ++step) {
    std::uint32_t w[C::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&pair)[4] = weights[m][2 * step + i / 2];
        w[m][i] = pack<T>(pair[2 * (i % 2)], pair[2 * (i % 2) + 1]);
      }
    }
#pragma unroll
    for (int group = 0; group < C::kGroups; ++group) {
      std::uint32_t b[4];
      ldmatrix_x4_trans(b, TileB::advance_rows8(TileB::advance_k(s_rows, group), 2 * step));
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        mma_m16n8k16<T>(acc[m][group][0], w[m], b[0], b[1]);
        mma_m16n8k16<T>(acc[m][group][1], w[m], b[2], b[3]);
      }
      between(step * C::kGroups + group);
    }
  }
}

/// Stores an accumulator tile of the thread's pairs, rounded to 16 bits, as weights [tile, step].
template <typename C>
__device__ __forceinline__ void store_weights(typename C::Element* s_weights,
                                              const float (&pairs)[4], const BwdThread<C>& t, int m,
                                              int n) {
  using Weights = typename C::Weights;
  static_assert(Weights::kPanelChunks % C::kPairColumnTiles == 0);
  // Rows of a thread are 8 apart, and its columns begin at a multiple of their number: one XOR
  // leads to another column.
  const std::uint32_t s_first = shared_address(s_weights) +
                                Weights::offset(t.pair_row(0, 0), t.pair_column0() / 8) +
                                4 * (t.lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    store_shared_4(Weights::advance_rows8(s_first ^ static_cast<unsigned>(16 * n), 2 * m + half),
                   pack<typename C::Element>(pairs[2 * half], pairs[2 * half + 1]));
  }
}

}  // namespace flashcore::cuda::sm80
