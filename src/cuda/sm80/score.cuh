// Scores: Q K^T in the accumulators, then the options and masks.
#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/memory.cuh"
#include "cuda/primitives/mma.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm80/config.cuh"
#include "cuda/sm80/mma_swap_ab.cuh"

namespace flashcore::cuda::sm80 {

/// The queries of a warp as operands, where there are registers for them: options take those.
template <typename C, bool kFastPath>
struct QFragments {
  static constexpr bool kKept = kFastPath && C::kQInRegisters;
  static constexpr int kReads = C::kSwapAB ? C::kSteps / 2 : C::kSteps;
  std::uint32_t read[kKept ? kReads : 1][C::kRowTiles][4];
};

/// Queries as A operands of k-step `read`; few rows as B operands of k-steps 2 read, 2 read + 1.
template <typename C>
__device__ __forceinline__ void read_queries(std::uint32_t (&q)[C::kRowTiles][4],
                                             const SharedStorage<C>& s, int read,
                                             const Thread<C>& t) {
  using Tile = typename C::QueryTile;
  if constexpr (C::kSwapAB) {
    const core::Coordinate b = core::ldmatrix_b_two_steps(t.lane);
    ldmatrix_x4(q[0],
                Tile::advance_k(shared_address(s.q) + Tile::offset(b.row, b.column), 2 * read));
  } else {
    const core::Coordinate a = core::ldmatrix_a(t.lane);
    const std::uint32_t s_q =
        shared_address(s.q) + Tile::offset(t.warp_m * C::kWarpRows + a.row, a.column);
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      ldmatrix_x4(q[m], Tile::advance_rows8(Tile::advance_k(s_q, read), 2 * m));
    }
  }
}

template <typename C, bool kFastPath>
__device__ __forceinline__ void load_q_fragments(QFragments<C, kFastPath>& q,
                                                 const SharedStorage<C>& s) {
  if constexpr (QFragments<C, kFastPath>::kKept) {
#pragma unroll
    for (int read = 0; read < q.kReads; ++read) {
      read_queries<C>(q.read[read], s, read, Thread<C>(threadIdx.x));
    }
  }
}

/// score += Q K^T of one k-step.
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

/// score = Q K^T of the warp's rows and the keys from row s_key of the tile on.
template <typename C, bool kFastPath, int kKeys>
__device__ __forceinline__ void gemm_qk(AccS<C, kKeys>& acc_s, const QFragments<C, kFastPath>& q,
                                        const SharedStorage<C>& s,
                                        const typename C::Element* s_keys, int s_key,
                                        const Thread<C>& t) {
  using Tile = typename C::KeyTile;
  using Queries = QFragments<C, kFastPath>;
  const core::Coordinate at = C::kSwapAB ? core::ldmatrix_a(t.lane) : core::ldmatrix_b(t.lane);
  const std::uint32_t s_k = shared_address(s_keys) + Tile::offset(s_key + at.row, at.column);
  const auto multiply = [&](const std::uint32_t(&q_now)[C::kRowTiles][4], int read) {
    if constexpr (C::kSwapAB) {
      gemm_qk_swap_ab<C, kKeys>(acc_s, q_now[0], s_k, 2 * read);
    } else {
      gemm_qk_step<C, kKeys>(acc_s, q_now, Tile::advance_k(s_k, read));
    }
  };
  if constexpr (Queries::kKept) {
#pragma unroll
    for (int read = 0; read < Queries::kReads; ++read) multiply(q.read[read], read);
  } else {
#pragma unroll 4  // a panel: unrolling more would need more registers for addresses
    for (int read = 0; read < Queries::kReads; ++read) {
      std::uint32_t q_now[C::kRowTiles][4];
      read_queries<C>(q_now, s, read, t);
      multiply(q_now, read);
    }
  }
}

/// score[key] += bias for one row's scores; g_bias is the row, [kv_len].
template <typename C, int kKeys, typename Bias>
__device__ __forceinline__ void add_bias(float (&acc_s)[kKeys / C::kTileWidth][4], int half,
                                         const Thread<C>& t, const Bias* g_bias,
                                         std::int64_t stride, std::int32_t first_key,
                                         KeyRange range) {
#pragma unroll
  for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int reg = C::reg_of(half, i);
      const std::int32_t key = first_key + t.column(n, reg);
      if (range.contains(key)) {
        acc_s[n][reg] += to_float(g_bias[key * stride]);
      }
    }
  }
}

template <typename C, int kKeys>
__device__ __forceinline__ void add_bias_row(float (&acc_s)[kKeys / C::kTileWidth][4], int half,
                                             const Thread<C>& t, const AttentionParams& p,
                                             std::int64_t offset, std::int32_t first_key,
                                             KeyRange range) {
  const auto add = [&](auto zero) {
    add_bias<C, kKeys>(acc_s, half, t, static_cast<const decltype(zero)*>(p.bias) + offset,
                       p.bias_strides.column, first_key, range);
  };
  if (p.bias_element == core::Element::f32) {
    add(0.f);
  } else {
    with_element<C>(p.bias_element, add);
  }
}

/// Softcap, ALiBi, bias and boolean mask of one row's scores (registers reg_of(half, …) of every
/// tile).
template <typename C, int kKeys>
__device__ __forceinline__ void apply_score_mods(float (&acc_s)[kKeys / C::kTileWidth][4], int half,
                                                 const Thread<C>& t, const AttentionParams& p,
                                                 const WorkTile& item, const Row& row,
                                                 KeyRange range, std::int32_t first_key) {
  const auto each = [&](auto change) {
#pragma unroll
    for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int reg = C::reg_of(half, i);
        change(acc_s[n][reg], first_key + t.column(n, reg));
      }
    }
  };
  if constexpr (!C::kKv8) {  // whose scores are scaled already
    const float factor = score_scale(p);
    each([&](float& x, std::int32_t) { x *= factor; });
  }
  const std::int64_t bias_row = item.b * p.bias_strides.batch + row.head * p.bias_strides.head +
                                row.query * p.bias_strides.row;
  const bool bias_first = p.fault.is(InjectedFault::softcap_after_bias);
  if (p.bias != nullptr && bias_first) {
    add_bias_row<C, kKeys>(acc_s, half, t, p, bias_row, first_key, range);
  }
  if (p.softcap > 0) {
    const float cap = static_cast<float>(p.softcap);
    each([&](float& x, std::int32_t) { x = capped_short(x, cap); });
  }
  if (p.alibi_slopes != nullptr) {
    const float slope =
        p.alibi_slopes[item.b * p.alibi_batch_stride + row.head * p.alibi_head_stride];
    const std::int64_t position = row.query + item.seq.mask.diagonal;
    each([&](float& x, std::int32_t key) {
      const float distance = static_cast<float>(position - key);
      x -= slope * (p.fault.is(InjectedFault::alibi_signed) ? distance : fabsf(distance));
    });
  }
  if (p.bias != nullptr && !bias_first) {
    add_bias_row<C, kKeys>(acc_s, half, t, p, bias_row, first_key, range);
  }
  if (p.mask != nullptr) {
    const std::int64_t b = p.fault.is(InjectedFault::mask_batch_ignored) ? 0 : item.b;
    const std::uint8_t* g_mask = p.mask + b * p.mask_strides.batch +
                                 row.head * p.mask_strides.head + row.query * p.mask_strides.row;
    each([&](float& x, std::int32_t key) {
      if (range.contains(key) && g_mask[key * p.mask_strides.column] == 0) {
        x = core::negative_infinity<float>();
      }
    });
  }
}

/// Options and masks, where a step needs them.
template <typename C, bool kFastPath, int kKeys>
__device__ __forceinline__ void apply_mods_and_mask(AccS<C, kKeys>& acc_s, const Thread<C>& t,
                                                    const AttentionParams& p, const WorkTile& item,
                                                    const WarpKeys& keys, std::int32_t first_key) {
  const bool all_visible =
      first_key >= keys.fully_visible.begin && first_key + kKeys <= keys.fully_visible.end;
  if (kFastPath && all_visible) return;  // the same in every lane
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = t.row(m, half);
      const Row row = row_of(p, item, r);
      // A row past the end sees nothing, whatever its query: no option reads for it.
      const KeyRange range =
          r < item.rows
              ? core::intersect(core::visible_keys(item.seq.mask, row.query), keys.visible)
              : KeyRange{0, 0};
      if constexpr (!kFastPath) {
        apply_score_mods<C, kKeys>(acc_s[m], half, t, p, item, row, range, first_key);
      }
#pragma unroll
      for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int reg = C::reg_of(half, i);
          if (!range.contains(first_key + t.column(n, reg))) {
            acc_s[m][n][reg] = core::negative_infinity<float>();
          }
        }
      }
    }
  }
}

}  // namespace flashcore::cuda::sm80
