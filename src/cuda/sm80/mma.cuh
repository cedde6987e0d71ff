// The GEMMs of a step by mma.sync: S = Q K^T and O += P V of a warp's rows and keys. S stays in
// registers: it is the accumulator of Q K^T and, packed to 16 bits, the A fragment of P V.
//
// Swap-AB, for up to 8 rows: with rows as M, half of each 16 × 8 MMA tile would be empty. Instead M
// is keys or columns of V: S^T = K Q^T, then O^T = V^T P^T. That halves the MMAs after the last
// loads of a step and the registers of S and O. In exchange, movmatrix transposes P^T on its way
// from accumulator to B operand.
#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/memory.cuh"
#include "cuda/primitives/mma.cuh"
#include "cuda/sm80/config.cuh"

namespace flashcore::cuda::sm80 {

/// The Q fragments of a warp, kept in registers if they fit. Score modifications need the
/// registers.
template <typename C, bool kFastPath>
struct QFragments {
  static constexpr bool kKept = kFastPath && C::kQInRegisters;
  static constexpr int kLoads = C::kSwapAB ? C::kGemmSteps / 2 : C::kGemmSteps;
  std::uint32_t frag[kKept ? kLoads : 1][C::kRowTiles][4];
};

/// Loads Q fragment i: the A operands of k-step i; swap-AB: the B operands of k-steps 2 i, 2 i + 1.
template <typename C>
__device__ __forceinline__ void load_q_fragment(std::uint32_t (&q)[C::kRowTiles][4],
                                                const SharedStorage<C>& s, int i,
                                                const Thread<C>& t) {
  using Tile = typename C::QueryTile;
  if constexpr (C::kSwapAB) {
    const core::Coordinate b = core::ldmatrix_b_two_steps(t.lane);
    ldmatrix_x4(q[0], Tile::advance_k(shared_address(s.q) + Tile::offset(b.row, b.column), 2 * i));
  } else {
    const core::Coordinate a = core::ldmatrix_a(t.lane);
    const std::uint32_t s_q =
        shared_address(s.q) + Tile::offset(t.warp_m * C::kWarpRows + a.row, a.column);
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      ldmatrix_x4(q[m], Tile::advance_rows8(Tile::advance_k(s_q, i), 2 * m));
    }
  }
}

template <typename C, bool kFastPath>
__device__ __forceinline__ void load_q_fragments(QFragments<C, kFastPath>& q,
                                                 const SharedStorage<C>& s) {
  if constexpr (QFragments<C, kFastPath>::kKept) {
#pragma unroll
    for (int i = 0; i < q.kLoads; ++i) {
      load_q_fragment<C>(q.frag[i], s, i, Thread<C>(threadIdx.x));
    }
  }
}

/// One k-step of S += Q K^T: [warp_rows, kKeys] += [warp_rows, 16] x [kKeys, 16]^T.
template <typename C, int kKeys>
__device__ __forceinline__ void gemm_qk_step(AccS<C, kKeys>& acc_s,
                                             const std::uint32_t (&q)[C::kRowTiles][4],
                                             std::uint32_t s_k) {
#pragma unroll
  for (int n = 0; n < kKeys / 8; n += 2) {
    std::uint32_t k[4];
    ldmatrix_x4(k, C::KeyTile::advance_rows8(s_k, n));
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      mma_m16n8k16<typename C::Element>(acc_s[m][n], q[m], k[0], k[1]);
      mma_m16n8k16<typename C::Element>(acc_s[m][n + 1], q[m], k[2], k[3]);
    }
  }
}

/// Swap-AB: k-steps first_step and first_step + 1 of S^T += K Q^T.
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

/// S += Q K^T: [warp_rows, kKeys] += [warp_rows, head_dim] x [kKeys, head_dim]^T, for the keys from
/// row s_key of the tile on.
template <typename C, bool kFastPath, int kKeys>
__device__ __forceinline__ void gemm_qk(AccS<C, kKeys>& acc_s, const QFragments<C, kFastPath>& q,
                                        const SharedStorage<C>& s,
                                        const typename C::Element* s_keys, int s_key,
                                        const Thread<C>& t) {
  using Tile = typename C::KeyTile;
  using Queries = QFragments<C, kFastPath>;
  const core::Coordinate at = C::kSwapAB ? core::ldmatrix_a(t.lane) : core::ldmatrix_b(t.lane);
  const std::uint32_t s_k = shared_address(s_keys) + Tile::offset(s_key + at.row, at.column);
  const auto multiply = [&](const std::uint32_t(&q_now)[C::kRowTiles][4], int i) {
    if constexpr (C::kSwapAB) {
      gemm_qk_swap_ab<C, kKeys>(acc_s, q_now[0], s_k, 2 * i);
    } else {
      gemm_qk_step<C, kKeys>(acc_s, q_now, Tile::advance_k(s_k, i));
    }
  };
  if constexpr (Queries::kKept) {
#pragma unroll
    for (int i = 0; i < Queries::kLoads; ++i) multiply(q.frag[i], i);
  } else {
#pragma unroll(kFastPath ? 4 : 2)  // at most one panel: more needs registers for addresses
    for (int i = 0; i < Queries::kLoads; ++i) {
      std::uint32_t q_now[C::kRowTiles][4];
      load_q_fragment<C>(q_now, s, i, t);
      multiply(q_now, i);
    }
  }
}

/// Packs P of 16 keys to A fragments. Two n-tiles of the accumulator are one fragment: their
/// columns are its k.
template <typename C, int kKeys>
__device__ __forceinline__ void pack_p(std::uint32_t (&p_frag)[C::kRowTiles][4],
                                       const AccS<C, kKeys>& p, int step) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int reg = 0; reg < 4; ++reg) {
      const float(&x)[4] = p[m][2 * step + reg / 2];
      p_frag[m][reg] = pack<typename C::Operand>(x[2 * (reg % 2)], x[2 * (reg % 2) + 1]);
    }
  }
}

/// The n-th 16 keys of O += P V. s_v: address of the lane's row and chunk for the first 16 keys.
template <typename C, int kKeys>
__device__ __forceinline__ void gemm_pv_step(AccO<C>& acc_o, const AccS<C, kKeys>& p,
                                             std::uint32_t s_v, int step) {
  using T = typename C::Element;
  using Tile = typename C::KeyTile;
  std::uint32_t p_frag[C::kRowTiles][4];
  pack_p<C, kKeys>(p_frag, p, step);
#pragma unroll
  for (int n = 0; n < C::kColumnTiles; n += 2) {
    std::uint32_t v[4];
    ldmatrix_x4_trans(v, Tile::advance_rows8(Tile::advance_k(s_v, n / 2), 2 * step));
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      mma_m16n8k16<T>(acc_o[m][n], p_frag[m], v[0], v[1]);
      mma_m16n8k16<T>(acc_o[m][n + 1], p_frag[m], v[2], v[3]);
    }
  }
}

/// O += P V: [warp_rows, head_dim] += [warp_rows, kKeys] x [kKeys, head_dim].
template <typename C, int kKeys>
__device__ __forceinline__ void gemm_pv(AccO<C>& acc_o, const AccS<C, kKeys>& p,
                                        const typename C::Element* s_values, int s_key,
                                        const Thread<C>& t) {
  const core::Coordinate b = core::ldmatrix_b_trans(t.lane);
  const std::uint32_t s_v = shared_address(s_values) + C::KeyTile::offset(s_key + b.row, b.column);
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
    gemm_pv_step<C, kKeys>(acc_o, p, s_v, step);
  }
}

/// Swap-AB: O^T += V^T P^T: [head_dim, 8] += [kKeys, head_dim]^T x [8, kKeys]^T.
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
    // In the accumulator a quad holds a key of P^T, in the B operand a row.
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
