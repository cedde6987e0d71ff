// Scores: Q K^T in the accumulators, then the options and masks.
#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/ptx.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm80/config.cuh"
#include "cuda/sm80/mma_swap_ab.cuh"

namespace flashcore::cuda::sm80 {

/// The queries of a warp as operands, where there are registers for them: options take those.
template <typename C, bool kPlain>
struct KeptQueries {
  static constexpr bool kKept = kPlain && C::kKeepsQueries;
  static constexpr int kReads = C::kFewRows ? C::kSteps / 2 : C::kSteps;
  std::uint32_t read[kKept ? kReads : 1][C::kRowTiles][4];
};

/// Queries as A operands of k-step `read`; few rows as B operands of k-steps 2 read, 2 read + 1.
template <typename C>
__device__ __forceinline__ void read_queries(std::uint32_t (&q)[C::kRowTiles][4],
                                             const SharedStorage<C>& s, int read,
                                             const Thread<C>& t) {
  using Tile = typename C::QueryTile;
  if constexpr (C::kFewRows) {
    const core::Coordinate b = core::ldmatrix_b_two_steps(t.lane);
    load_matrices(q[0], Tile::right(shared_address(s.q) + Tile::offset(b.row, b.column), 2 * read));
  } else {
    const core::Coordinate a = core::ldmatrix_a(t.lane);
    const std::uint32_t s_q =
        shared_address(s.q) + Tile::offset(t.row_warp * C::kWarpRows + a.row, a.column);
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      load_matrices(q[m], Tile::below(Tile::right(s_q, read), 2 * m));
    }
  }
}

template <typename C, bool kPlain>
__device__ __forceinline__ void keep_queries(KeptQueries<C, kPlain>& q, const SharedStorage<C>& s) {
  if constexpr (KeptQueries<C, kPlain>::kKept) {
#pragma unroll
    for (int read = 0; read < q.kReads; ++read) {
      read_queries<C>(q.read[read], s, read, Thread<C>(threadIdx.x));
    }
  }
}

/// score += Q K^T of one k-step.
template <typename C, int kKeys>
__device__ __forceinline__ void multiply_step(Scores<C, kKeys>& score,
                                              const std::uint32_t (&q)[C::kRowTiles][4],
                                              std::uint32_t s_k) {
#pragma unroll
  for (int n = 0; n < kKeys / 8; n += 2) {
    std::uint32_t k[4];
    load_matrices(k, C::KeyTile::below(s_k, n));
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      multiply_add<typename C::Element>(score[m][n], q[m], k[0], k[1]);
      multiply_add<typename C::Element>(score[m][n + 1], q[m], k[2], k[3]);
    }
  }
}

/// score = Q K^T of the warp's rows and the keys from row s_key of the tile on.
template <typename C, bool kPlain, int kKeys>
__device__ __forceinline__ void multiply_queries(Scores<C, kKeys>& score,
                                                 const KeptQueries<C, kPlain>& q,
                                                 const SharedStorage<C>& s,
                                                 const typename C::Element* s_keys, int s_key,
                                                 const Thread<C>& t) {
  using Tile = typename C::KeyTile;
  using Queries = KeptQueries<C, kPlain>;
  const core::Coordinate at = C::kFewRows ? core::ldmatrix_a(t.lane) : core::ldmatrix_b(t.lane);
  const std::uint32_t s_k = shared_address(s_keys) + Tile::offset(s_key + at.row, at.column);
  const auto multiply = [&](const std::uint32_t(&q_now)[C::kRowTiles][4], int read) {
    if constexpr (C::kFewRows) {
      multiply_two_steps<C, kKeys>(score, q_now[0], s_k, 2 * read);
    } else {
      multiply_step<C, kKeys>(score, q_now, Tile::right(s_k, read));
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
__device__ __forceinline__ void add_bias(float (&score)[kKeys / C::kTileWidth][4], int half,
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
        score[n][reg] += to_float(g_bias[key * stride]);
      }
    }
  }
}

template <typename C, int kKeys>
__device__ __forceinline__ void add_bias_row(float (&score)[kKeys / C::kTileWidth][4], int half,
                                             const Thread<C>& t, const AttentionParams& p,
                                             std::int64_t offset, std::int32_t first_key,
                                             KeyRange range) {
  const auto add = [&](auto zero) {
    add_bias<C, kKeys>(score, half, t, static_cast<const decltype(zero)*>(p.bias) + offset,
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
__device__ __forceinline__ void finish_row(float (&score)[kKeys / C::kTileWidth][4], int half,
                                           const Thread<C>& t, const AttentionParams& p,
                                           const Item& item, const Row& row, KeyRange range,
                                           std::int32_t first_key) {
  const auto each = [&](auto change) {
#pragma unroll
    for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int reg = C::reg_of(half, i);
        change(score[n][reg], first_key + t.column(n, reg));
      }
    }
  };
  if constexpr (!C::kCodes) {  // whose scores are scaled already
    const float factor = score_factor(p);
    each([&](float& x, std::int32_t) { x *= factor; });
  }
  const std::int64_t bias_row = item.b * p.bias_strides.batch + row.head * p.bias_strides.head +
                                row.query * p.bias_strides.row;
  const bool bias_first = p.plant.is(PlantedBug::softcap_after_bias);
  if (p.bias != nullptr && bias_first) {
    add_bias_row<C, kKeys>(score, half, t, p, bias_row, first_key, range);
  }
  if (p.softcap > 0) {
    const float cap = static_cast<float>(p.softcap);
    each([&](float& x, std::int32_t) { x = capped_short(x, cap); });
  }
  if (p.alibi_slopes != nullptr) {
    const float slope =
        p.alibi_slopes[item.b * p.alibi_batch_stride + row.head * p.alibi_head_stride];
    const std::int64_t position = row.query + item.sequence.mask.diagonal;
    each([&](float& x, std::int32_t key) {
      const float distance = static_cast<float>(position - key);
      x -= slope * (p.plant.is(PlantedBug::alibi_signed) ? distance : fabsf(distance));
    });
  }
  if (p.bias != nullptr && !bias_first) {
    add_bias_row<C, kKeys>(score, half, t, p, bias_row, first_key, range);
  }
  if (p.mask != nullptr) {
    const std::int64_t b = p.plant.is(PlantedBug::mask_batch_ignored) ? 0 : item.b;
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
template <typename C, bool kPlain, int kKeys>
__device__ __forceinline__ void finish_scores(Scores<C, kKeys>& score, const Thread<C>& t,
                                              const AttentionParams& p, const Item& item,
                                              const WarpKeys& keys, std::int32_t first_key) {
  const bool all_visible = first_key >= keys.all.begin && first_key + kKeys <= keys.all.end;
  if (kPlain && all_visible) return;  // the same in every lane
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = t.row(m, half);
      const Row row = row_of(p, item, r);
      // A row past the end sees nothing, whatever its query: no option reads for it.
      const KeyRange range =
          r < item.rows
              ? core::intersect(core::visible_keys(item.sequence.mask, row.query), keys.seen)
              : KeyRange{0, 0};
      if constexpr (!kPlain) {
        finish_row<C, kKeys>(score[m], half, t, p, item, row, range, first_key);
      }
#pragma unroll
      for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int reg = C::reg_of(half, i);
          if (!range.contains(first_key + t.column(n, reg))) {
            score[m][n][reg] = core::negative_infinity<float>();
          }
        }
      }
    }
  }
}

}  // namespace flashcore::cuda::sm80
