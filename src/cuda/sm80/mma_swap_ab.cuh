// Products for 8 rows or fewer. mma's 16 × 8 tiles would be half empty with rows as the 16: here
// the 16 are keys, or columns of V. S^T = K Q^T, then O^T = V^T P^T: half as many instructions
// behind the last bytes of a step, and half as many scores and outputs in registers. In exchange
// P^T is transposed on its way from accumulator to operand.
#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/memory.cuh"
#include "cuda/primitives/mma.cuh"
#include "cuda/sm80/config.cuh"

namespace flashcore::cuda::sm80 {

/// score += K Q^T of k-steps first_step and first_step + 1.
template <typename C, int kKeys>
__device__ __forceinline__ void gemm_qk_swap_ab(AccS<C, kKeys>& acc_s, const std::uint32_t (&q)[4],
                                                std::uint32_t s_k, int first_step) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      std::uint32_t k[4];
      ldmatrix_x4(k,
                  C::KeyTile::advance_rows8(C::KeyTile::advance_k(s_k, first_step + step), 2 * n));
      mma_m16n8k16<typename C::Element>(acc_s[0][n], k, q[2 * step], q[2 * step + 1]);
    }
  }
}

/// O^T += V^T P^T of the warp's keys.
template <typename C, int kKeys>
__device__ __forceinline__ void gemm_pv_swap_ab(AccO<C>& acc_o, const AccS<C, kKeys>& p,
                                                const typename C::Element* s_values, int s_key,
                                                const Thread<C>& t) {
  using T = typename C::Element;
  using Tile = typename C::KeyTile;
  const core::Coordinate a = core::ldmatrix_a_trans(t.lane);
  const std::uint32_t s_v = shared_address(s_values) + Tile::offset(s_key + a.row, a.column);
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
    // A quad has a key's probabilities; as an operand it has a row's.
    const std::uint32_t low = movmatrix_trans(pack<T>(p[0][step][0], p[0][step][1]));
    const std::uint32_t high = movmatrix_trans(pack<T>(p[0][step][2], p[0][step][3]));
#pragma unroll
    for (int n = 0; n < C::kColumnTiles; ++n) {
      std::uint32_t v[4];
      ldmatrix_x4_trans(v, Tile::advance_rows8(Tile::advance_k(s_v, n), 2 * step));
      mma_m16n8k16<T>(acc_o[0][n], v, low, high);
    }
  }
}

}  // namespace flashcore::cuda::sm80
