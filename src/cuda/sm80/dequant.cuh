// GEMMs with 8-bit K and V. Tiles stay 8-bit in shared memory and become f16 operands in registers,
// exactly (core/dequant_f16.h). Scales multiply S, P and O in f32, never the operands.
#pragma once

#include "core/dequant_f16.h"
#include "cuda/primitives/memory.cuh"
#include "cuda/primitives/mma.cuh"
#include "cuda/sm80/mma.cuh"

namespace flashcore::cuda::sm80 {

/// Calls use(dequantize) with the conversion of a format, dequantize(word) -> F16x2Pair. One branch
/// serves a whole tile.
template <typename C, typename Use>
__device__ __forceinline__ void with_dequantizer(const AttentionParams& p, core::Element element,
                                                 Use use) {
  using core::Element;
  const auto use_format = [&](auto format) {
    use([&](std::uint32_t word) { return format(word & core::code_mask(p)); });
  };
  if (element == Element::e4m3) {
    use_format(core::Dequantizer<Element::e4m3>(element));
  } else if (element == Element::e5m2) {
    use_format(core::Dequantizer<Element::e5m2>(element));
  } else {
    use_format(core::Dequantizer<Element::int8>(element));
  }
}

/// S += Q K^T with 8-bit K: [warp_rows, kKeys] += [warp_rows, head_dim] x [kKeys, head_dim]^T, for
/// the keys from row s_key of the tile on. One chunk of K is one k-step.
template <typename C, bool kFastPath, int kKeys>
__device__ __forceinline__ void gemm_qk_kv8(AccS<C, kKeys>& acc_s,
                                            const QFragments<C, kFastPath>& q,
                                            const SharedStorage<C>& s, const AttentionParams& p,
                                            int stage, int s_key, const Thread<C>& t) {
  using Tile = typename C::KeyTile;
  constexpr bool kKept = QFragments<C, kFastPath>::kKept;
  const core::Coordinate b = core::ldmatrix_b(t.lane);
  const std::uint32_t s_k = shared_address(s.k[stage]) + Tile::offset(s_key + b.row, b.column);
  with_dequantizer<C>(p, p.k_element, [&](auto dequantize) {
#pragma unroll(kKept ? C::kGemmSteps / 2 : kFastPath ? 2 : 1)
    for (int steps = 0; steps < C::kGemmSteps; steps += 2) {
      [[maybe_unused]] std::uint32_t q_now[2][C::kRowTiles][4];
      if constexpr (!kKept) {
        load_q_fragment<C>(q_now[0], s, steps, t);
        load_q_fragment<C>(q_now[1], s, steps + 1, t);
      }
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        std::uint32_t k[4];  // two n-tiles, two k-steps each
        ldmatrix_x4(k, Tile::advance_rows8(Tile::advance_k(s_k, steps / 2), n));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const core::F16x2Pair pairs = dequantize(k[i]);
#pragma unroll
          for (int m = 0; m < C::kRowTiles; ++m) {
            if constexpr (kKept) {
              mma_m16n8k16<typename C::Operand>(acc_s[m][n + i / 2], q.frag[steps + i % 2][m],
                                                pairs.even, pairs.odd);
            } else {
              mma_m16n8k16<typename C::Operand>(acc_s[m][n + i / 2], q_now[i % 2][m], pairs.even,
                                                pairs.odd);
            }
          }
        }
      }
    }
  });
}

/// Multiplies the columns of S or P by the scales of their keys times `factor`.
template <typename C, int kKeys>
__device__ __forceinline__ void scale_columns(AccS<C, kKeys>& acc_s, const float* s_scales,
                                              float factor, const Thread<C>& t) {
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
    const float2 scale = *reinterpret_cast<const float2*>(s_scales + t.column(n, 0));
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) {
        acc_s[m][n][reg] *= (reg % 2 == 0 ? scale.x : scale.y) * factor;
      }
    }
  }
}

/// Applies the scales of Q, K and the softmax to S.
template <typename C, int kKeys>
__device__ __forceinline__ void scale_scores(AccS<C, kKeys>& acc_s, const Kv8Scales<C>& s,
                                             const AttentionParams& p, int stage, int s_key,
                                             const Thread<C>& t) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
    const float row_scale[2] = {s.row_scale[t.row(m, 0)], s.row_scale[t.row(m, 1)]};
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) acc_s[m][n][reg] *= row_scale[reg / 2];
    }
  }
  if (p.k_scale.is_per_block()) scale_columns<C, kKeys>(acc_s, s.k_scale[stage] + s_key, 1.f, t);
}

/// Folds V's scales per block into P, after its row sums and before P V.
template <typename C, int kKeys>
__device__ __forceinline__ void scale_p(AccS<C, kKeys>& acc_s, const Kv8Scales<C>& s,
                                        const AttentionParams& p, int stage, int s_key,
                                        const Thread<C>& t) {
  if (!p.v_scale.is_per_block()) return;
  scale_columns<C, kKeys>(acc_s, s.v_scale[stage] + s_key, s.v_unit_inverse, t);
}

/// O += P V with 8-bit V: [warp_rows, head_dim] += [warp_rows, kKeys] x [kKeys, head_dim]. One
/// chunk of V is two n-tiles: its even columns and its odd columns.
template <typename C, int kKeys>
__device__ __forceinline__ void gemm_pv_kv8(AccO<C>& acc_o, const AccS<C, kKeys>& acc_p,
                                            const SharedStorage<C>& s, const AttentionParams& p,
                                            int stage, int s_key, const Thread<C>& t) {
  using T = typename C::Operand;
  using Tile = typename C::KeyTile;
  const core::Coordinate b = core::ldmatrix_b_trans(t.lane);
  const std::uint32_t s_v = shared_address(s.v[stage]) + Tile::offset(s_key + b.row, b.column);
  with_dequantizer<C>(p, p.v_element, [&](auto dequantize) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      std::uint32_t p_frag[C::kRowTiles][4];
      pack_p<C, kKeys>(p_frag, acc_p, step);
#pragma unroll
      for (int n = 0; n < C::kColumnTiles; n += 4) {
        std::uint32_t v[4];  // two chunks, eight keys each
        ldmatrix_x4_trans(v, Tile::advance_rows8(Tile::advance_k(s_v, n / 4), 2 * step));
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          const core::F16x2Pair first = dequantize(v[2 * chunk]);
          const core::F16x2Pair second = dequantize(v[2 * chunk + 1]);
#pragma unroll
          for (int m = 0; m < C::kRowTiles; ++m) {
            mma_m16n8k16<T>(acc_o[m][n + 2 * chunk], p_frag[m], first.even, second.even);
            mma_m16n8k16<T>(acc_o[m][n + 2 * chunk + 1], p_frag[m], first.odd, second.odd);
          }
        }
      }
    }
  });
}

}  // namespace flashcore::cuda::sm80
