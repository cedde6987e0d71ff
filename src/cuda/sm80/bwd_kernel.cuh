// Gradients of attention by mma.sync (sm_80 and up), for head dims to 256, with every option.
// core/backward_tiles.h lists the work tiles; common/backward.cu computes the statistics of the
// rows before: P = exp(S - base) · factor, and delta.
//
// A CTA has kTile rows of operand A, and steps through those of operand B, kStep at a time:
//
//            A1   A2   B1   B2   S = A1 B1ᵀ, dP = A2 B2ᵀ, dZ = P (dP - delta), then
//   dkdv     K    V    Q    dO   dK += dZ B1, dV += P B2 (S, P, dZ have keys as rows)
//   dq       Q    dO   K    V    dQ += dZ B1
//   dbias    Q    dO   K    V    dbias += dS
//
//   waits              B2, all warps    P              B1(i+1), all warps
//   cp.async           B1(i+1)                         B2(i+1)
//   MMA       | S = A1 B1ᵀ |   | dP = A2 B2ᵀ |  | dV += P B2 |   | += dZ B1 |
//   ALU                          P -> smem        dZ -> smem
//
//   dq of head dims to 128: dZ stays in registers, and a step begins with its only barrier.
//
//   grid    one CTA per work tile. Each gradient has one writer, and every sum a fixed order
//   CTA     head dims to 128: 4 warps, a step of 64 × 64 pairs (dkdv) or 128 × 32 (dq); above: 8
//           warps, 64 × 32. A warp has a block of pairs (32 × 32 or 16 × 16). Its block of
//           gradients has 32 rows and all columns (dq of head dims to 128), or 16 columns of every
//           32 or 64: then P and dZ pass through shared memory
//   f16     dS is rounded to f16 in units that keep it in range (core::ds_unit)
//   NaN     as in simt/bwd.cuh: P and dZ of a hidden pair are selected to 0. An operand that is
//           not finite becomes 0 in shared memory before the products over pairs. The fast path
//           does so only if the sums of a tile are not finite: then it computes the tile again
//   paths   fast path: scores are only scaled and masked by position, rows are 16-byte aligned.
//           General path: every option, any strides
//
//   file              content
//   bwd_config.cuh    shapes, shared memory, a thread's position in fragments
//   bwd_load.cuh      cp.async into swizzled tiles; row statistics; the CTA's work
//   bwd_mma.cuh       products over columns and over pairs
//   bwd_score.cuh     P and dZ: options, masks, NaN
//   bwd_plain.cuh     P and dZ of the fast path, between MMAs
//   bwd_steps.cuh     loads of the steps of a work tile
//   bwd_mainloop.cuh  the steps of a work tile
//   bwd_epilogue.cuh  stores
//
//   smem                  shape               type
//   a1, a2                [kTile, head_dim]   16-bit, swizzled
//   b1, b2                [kStages…][kStep, head_dim]   16-bit, swizzled
//   p, dz                 [kTile, kStep]      16-bit, swizzled; not if dZ stays in registers
//   base, factor, delta   [queries]           f32
//   range                 [queries]           the keys that a query sees
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm80/bwd_epilogue.cuh"
#include "cuda/sm80/bwd_mainloop.cuh"

namespace flashcore::cuda::sm80 {

/// dK and dV of the rows of A.
struct ComputeDkdv {
  template <typename C, bool kFastPath, bool kCareful>
  __device__ __forceinline__ static bool run(BwdTiles<C>& s, const BackwardParams& p) {
    const core::AttentionParams& f = p.fwd;
    const BwdWork& work = s.work;
    AccGradient<C> dk = {}, dv = {};
    if (!sum_gradients<C, kFastPath, true, kCareful>(s, p, dk, dv)) return false;
    // Dense rows past the sequence's keys are written here, varlen rows were zeroed before.
    const bool whole = f.cu_seqlens_k == nullptr && !f.fault.is(InjectedFault::dk_tail_unwritten);
    const int rows = whole ? min(C::kTile, f.kv_len - work.first_a) : work.rows_a;
    const std::int32_t first = work.seq.k_row + work.first_a;
    if (p.dk != nullptr) {
      const auto scale = static_cast<float>(p.scale);
      const bool twice = f.fault.is(InjectedFault::dk_scale_twice);
      store_gradient<C>(dk, s, p.dk, p.dk_element,
                        core::row_offset(p.dk_strides, work.b, work.kv_head, first), p.dk_strides,
                        rows, f.head_dim, (twice ? scale * scale : scale) / work.unit);
    }
    if (p.dv != nullptr) {
      store_gradient<C>(dv, s, p.dv, p.dv_element,
                        core::row_offset(p.dv_strides, work.b, work.kv_head, first), p.dv_strides,
                        rows, f.v_dim, 1.f);
    }
    return true;
  }
};

/// dQ of the rows of A.
struct ComputeDq {
  template <typename C, bool kFastPath, bool kCareful>
  __device__ __forceinline__ static bool run(BwdTiles<C>& s, const BackwardParams& p) {
    const core::AttentionParams& f = p.fwd;
    const BwdWork& work = s.work;
    AccGradient<C> dq = {}, none;
    if (!sum_gradients<C, kFastPath, false, kCareful>(s, p, dq, none)) return false;
    const bool unscaled = f.fault.is(InjectedFault::dq_scale_missing);
    store_gradient<C>(dq, s, p.dq, p.dq_element,
                      core::row_offset(p.dq_strides, work.b, work.h, work.seq.q_row + work.first_a),
                      p.dq_strides, work.rows_a, f.head_dim,
                      (unscaled ? 1.f : static_cast<float>(p.scale)) / work.unit);
    return true;
  }
};

/// dK and dV of a KV tile, over all query heads of the group.
template <typename C, bool kFastPath>
__device__ __forceinline__ void compute_dkdv(BwdTiles<C>& s, const BackwardParams& p,
                                             const core::BackwardTile& tile) {
  select_work<C>(s, p, tile, tile.b, tile.head * p.group, tile.head);
  compute_gradients<C, kFastPath, ComputeDkdv>(s, p);
}

/// dQ of a query tile.
template <typename C, bool kFastPath>
__device__ __forceinline__ void compute_dq(BwdTiles<C>& s, const BackwardParams& p,
                                           const core::BackwardTile& tile) {
  select_work<C>(s, p, tile, tile.b, tile.head, tile.head / p.group);
  if (s.work.rows_a > 0) compute_gradients<C, kFastPath, ComputeDq>(s, p);
}

/// A tile of dbias, over the axes that the bias repeats.
template <typename C, bool kFastPath>
__device__ __forceinline__ void compute_dbias(BwdTiles<C>& s, const BackwardParams& p,
                                              const core::BackwardTile& tile) {
  const core::AttentionParams& f = p.fwd;
  AccPairs<C> sum = {};
  const bool one_batch = p.dbias_batch > 1 || f.fault.is(InjectedFault::dbias_first_batch);
  const std::int32_t b_end = one_batch ? tile.b + 1 : f.batch;
  const std::int32_t h_end = p.dbias_heads > 1 ? tile.head + 1 : f.q_heads;
  const bool one_row = p.dbias_rows == 1;
#pragma unroll 1
  for (std::int32_t b = tile.b; b < b_end; ++b) {
#pragma unroll 1
    for (std::int32_t h = tile.head; h < h_end; ++h) {
      core::BackwardTile rows = tile;
      rows.tile = one_row ? 0 : tile.tile;
      const std::int32_t end = one_row ? f.q_tiles : tile.tile + 1;
#pragma unroll 1
      for (; rows.tile < end; ++rows.tile) {
        select_work<C>(s, p, rows, b, h, h / p.group);
        const BwdWork& work = s.work;
        if (work.rows_a <= 0) continue;
        const KeyRange keys = core::intersect(
            {tile.first_key, tile.first_key + C::kStep},
            core::keys_seen_by_any(work.seq.mask, work.first_a, work.first_a + work.rows_a - 1));
        if (keys.empty()) continue;
        add_dbias_step<C, kFastPath>(sum, s, p, tile.first_key, keys.end);
      }
    }
  }
  store_dbias<C>(sum, s, p, tile);
}

template <typename Config, bool kFastPath>
__device__ __forceinline__ void run_bwd_cta(const BackwardParams& p) {
  extern __shared__ __align__(128) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<BwdStorage<Config>*>(s_bytes);
  const core::BackwardGrid grid = core::backward_grid(p);
  const core::BackwardTile tile = core::backward_tile(p, grid, blockIdx.x);
  if (tile.output == BackwardOutput::dkdv) {
    compute_dkdv<typename Config::Keys, kFastPath>(s.keys, p, tile);
  } else if (tile.output == BackwardOutput::dq) {
    compute_dq<typename Config::Queries, kFastPath>(s.queries, p, tile);
  } else if constexpr (!kFastPath) {  // a call with a bias takes the general path
    compute_dbias<typename Config::Queries, kFastPath>(s.queries, p, tile);
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinCtas)
    bwd_kernel(const __grid_constant__ BackwardParams p) {
  run_bwd_cta<Config, true>(p);
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinCtas)
    bwd_kernel_general(const __grid_constant__ BackwardParams p) {
  run_bwd_cta<Config, false>(p);
}

}  // namespace flashcore::cuda::sm80
