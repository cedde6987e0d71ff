// Plain steps: KV tiles that every row of a large work tile sees whole, on the fast path. Most
// steps of a prefill are plain. They have no masks, no range checks and no branch but the rescale,
// addresses stay in registers, and the exponentials of 16 keys are found between the MMAs of the 16
// before. The results have the same bits as those of mainloop_step().
#pragma once

#include "cuda/sm80/load.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/softmax.cuh"

namespace flashcore::cuda::sm80 {

/// Plain steps begin at tiles before this key. The tile is visible to all rows, and the next one,
/// whose K the step requests, is inside the sequence: masks hide those of its keys that no row
/// sees.
template <typename C>
__device__ __forceinline__ std::int32_t plain_end(const AttentionParams& p, const WorkTile& work) {
  constexpr int kRowStep = ThreadCopies<typename C::KeyTile, C::kThreads>::kRowStep;
  const bool takes_plain = !p.has_mask() && p.head_dim == C::kHeadDim && p.v_dim == C::kHeadDim &&
                           !p.fault.is(InjectedFault::head_dim_truncated) &&
                           (work.g_table == nullptr || p.pages.shift >= core::page_shift(kRowStep));
  const std::int32_t last = min(work.fully_visible.end, work.seq.kv_len - C::kTileK) - C::kTileK;
  return takes_plain ? last + 1 : 0;
}

/// A thread's copies of K and V, one tile after the other. With pages, each contains all rows of a
/// copy, so a lane looks up the page of one copy for its warp, half a step before K needs it.
template <typename C>
struct PlainCopies {
  using T = typename C::Stored;
  using Tile = typename C::KeyTile;
  using Mine = ThreadCopies<Tile, C::kThreads>;
  static constexpr int kMyRows = C::kTileK / Mine::kRowStep;
  static_assert(32 % kMyRows == 0 && C::kTileK % Mine::kRowStep == 0);

  // The thread's first chunk of the next tile; paged: of page 0.
  const T* g_k;
  const T* g_v;
  std::uint32_t s_to;  // where it goes
  std::int32_t page;   // of a copy of the next tile; not checked yet

  __device__ __forceinline__ PlainCopies(SharedStorage<C>& s, const AttentionParams& p,
                                         std::int32_t next_tile) {
    const Mine mine(opaque(threadIdx.x));
    const std::int64_t row = (is_paged(p) ? 0 : next_tile) + mine.row;
    g_k = static_cast<const T*>(s.work.g_k) + row * p.k_strides.row + 8 * mine.chunk;
    g_v = static_cast<const T*>(s.work.g_v) + row * p.v_strides.row + 8 * mine.chunk;
    s_to = shared_address(s.k[0]) + Tile::offset(mine.row, mine.chunk);
    // Otherwise the compiler keeps the summands, in more registers.
    asm volatile("" : "+l"(g_k), "+l"(g_v), "+r"(s_to));
  }

  __device__ __forceinline__ void find_pages(const SharedStorage<C>& s, const AttentionParams& p,
                                             std::int32_t next_tile) {
    if (!is_paged(p)) return;
    const auto* g_table = reinterpret_cast<const std::uint32_t*>(s.work.g_table);
    page = static_cast<int>(load_global(g_table + (lane_key(next_tile) >> p.pages.shift)));
  }
  __device__ __forceinline__ void copy_k(const AttentionParams& p, std::int32_t next_tile) {
    copy_tile(s_to, g_k, p.k_strides, p, next_tile);
  }
  __device__ __forceinline__ void copy_v(const AttentionParams& p, std::int32_t next_tile) {
    copy_tile(s_to + C::kTileK * C::kHeadDim * sizeof(T), g_v, p.v_strides, p, next_tile);
  }

 private:
  __device__ __forceinline__ static bool is_paged(const AttentionParams& p) {
    return p.pages.table != nullptr;
  }
  /// First key of the copy whose page the lane looks up.
  __device__ __forceinline__ static std::int32_t lane_key(std::int32_t next_tile) {
    return next_tile + opaque(threadIdx.x) % kMyRows * Mine::kRowStep;
  }
  __device__ __forceinline__ void copy_row(std::uint32_t s_first, const T* g_row, int n) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      cp_async_16(Mine::nth_row(s_first, n) + panel * Tile::kPanelBytes,
                  g_row + panel * Tile::kPanelColumns);
    }
  }
  __device__ __forceinline__ void copy_tile(std::uint32_t s_first, const T*& g_first,
                                            const core::Strides& strides, const AttentionParams& p,
                                            std::int32_t next_tile) {
    if (is_paged(p)) {
      const std::int64_t offset = (p.pages.valid(page) ? page : 0) * strides.batch +
                                  (lane_key(next_tile) & (p.pages.size - 1)) * strides.row;
#pragma unroll
      for (int n = 0; n < kMyRows; ++n) {
        copy_row(s_first, g_first + __shfl_sync(0xffffffffu, offset, n), n);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kMyRows; ++n) {
        copy_row(s_first, g_first, n);
        g_first += Mine::kRowStep * strides.row;
      }
    }
    cp_async_commit();
  }
};

/// Addresses of a thread's rows for ldmatrix.
template <typename C>
struct PlainAddresses {
  std::uint32_t s_q, s_k, s_v;

  __device__ __forceinline__ explicit PlainAddresses(const SharedStorage<C>& s) {
    const Thread<C> t(opaque(threadIdx.x));
    const core::Coordinate q = core::ldmatrix_a(t.lane);
    s_q = shared_address(s.q) + C::QueryTile::offset(t.warp_m * C::kWarpRows + q.row, q.column);
    const core::Coordinate k = core::ldmatrix_b(t.lane);
    s_k = shared_address(s.k[0]) + C::KeyTile::offset(k.row, k.column);
    const core::Coordinate v = core::ldmatrix_b_trans(t.lane);
    s_v = shared_address(s.v[0]) + C::KeyTile::offset(v.row, v.column);
  }
};

/// S = Q K^T of a tile.
template <typename C>
__device__ __forceinline__ void plain_qk(AccS<C, C::kTileK>& acc_s, const PlainAddresses<C>& at) {
  using Tile = typename C::QueryTile;
#pragma unroll
  for (int i = 0; i < C::kGemmSteps; ++i) {
    std::uint32_t q[C::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      ldmatrix_x4(q[m], Tile::advance_rows8(Tile::advance_k(at.s_q, i), 2 * m));
    }
    gemm_qk_step<C, C::kTileK>(acc_s, q, C::KeyTile::advance_k(at.s_k, i));
  }
}

/// P of 16 keys in place of S, and their sums.
template <typename C>
__device__ __forceinline__ void exponentiate_16(AccS<C, C::kTileK>& acc_s,
                                                float (&sums)[C::kRowTiles][2],
                                                const float (&bases)[C::kRowTiles][2],
                                                float unit_log2, int step) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = acc_s[m][2 * step + i / 2][C::reg_of(half, i % 2)];
        x = fast_exp2(fmaf(x, unit_log2, -bases[m][half]));
        sums[m][half] += x;
      }
    }
  }
}

/// P = 2^((S - max) unit_log2), row sums, O += P V: of 16 keys at a time, one ahead of the MMAs.
template <typename C>
__device__ __forceinline__ void plain_pv(AccO<C>& acc_o, AccS<C, C::kTileK>& acc_s,
                                         RowStats<C>& stats, const PlainAddresses<C>& at,
                                         float unit_log2) {
  constexpr int kSteps = C::kTileK / 16;
  float sums[C::kRowTiles][2] = {}, bases[C::kRowTiles][2];
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bases[m][half] = __fmul_rn(core::softmax_base(stats.of[m][half].max), unit_log2);
    }
  }
  exponentiate_16<C>(acc_s, sums, bases, unit_log2, 0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) exponentiate_16<C>(acc_s, sums, bases, unit_log2, step + 1);
    gemm_pv_step<C, C::kTileK>(acc_o, acc_s, at.s_v, step);
  }
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) stats.of[m][half].sum += sums[m][half];
  }
}

/// Runs plain steps from `tile` on, before plain_end(), and returns the first tile behind them. K
/// and V of `tile` have been requested, and K has arrived.
template <typename C>
__device__ __forceinline__ std::int32_t run_plain_steps(SharedStorage<C>& s,
                                                        const AttentionParams& p, AccO<C>& acc_o,
                                                        std::int32_t tile) {
  PlainCopies<C> copies(s, p, tile + C::kTileK);
  const PlainAddresses<C> at(s);
  RowStats<C> stats = s.row_stats[threadIdx.x];
  const float unit_log2 = s.work.unit_log2;
#pragma unroll 1
  while (true) {
    tile += C::kTileK;
    copies.find_pages(s, p, tile);
    AccS<C, C::kTileK> acc_s = {};
    plain_qk<C>(acc_s, at);
    float max[C::kRowTiles][2];
    const bool all_keep = own_maxima<C, C::kTileK>(max, acc_s, stats, unit_log2);
    cp_async_wait<0>();
    __syncthreads();
    copies.copy_k(p, tile);
    if (!__all_sync(0xffffffffu, all_keep)) {
      rescale_rows<C>(max, acc_o, stats, unit_log2, true, p);
    }
    plain_pv<C>(acc_o, acc_s, stats, at, unit_log2);
    if (tile >= s.plain_end) break;
    cp_async_wait<0>();
    __syncthreads();
    copies.copy_v(p, tile);
  }
  s.row_stats[threadIdx.x] = stats;
  return tile;
}

}  // namespace flashcore::cuda::sm80
