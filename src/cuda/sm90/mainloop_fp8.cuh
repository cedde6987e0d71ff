// The fp8 mainloop: e4m3 Q, K, V and P. A step runs in sequence, S = Q K^T, softmax, O += P V;
// other warpgroups fill its waits (core::consume_fp8).
//
//   P  is e4m3 too, times 2^8. Scales multiply scores and outputs, never operands.
//   O  Tensor cores accumulate e4m3 products with few bits. Each step's P V goes to accumulators of
//      its own, which are added to O in f32, together with its rescaling.
#pragma once

#include "cuda/sm90/mainloop.cuh"

namespace flashcore::cuda::sm90 {

/// Four values as e4m3 in one register, the first one lowest.
__device__ __forceinline__ std::uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  std::uint32_t packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(packed)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return packed;
}

/// P as A fragments of 32 keys: four n-tiles of S. The transposed V has its keys in the same order
/// (core::key_at).
template <typename C>
__device__ __forceinline__ void pack_p_fp8(std::uint32_t (&p_frag)[C::kTileK / 32][4],
                                           const AccS<C>& acc_s) {
#pragma unroll
  for (int i = 0; i < C::kTileK / 8; ++i) {
    const float* x = &acc_s[8 * (i / 2) + 2 * (i % 2)];
    p_frag[i / 4][i % 4] = pack_e4m3(x[0], x[1], x[4], x[5]);
  }
}

/// Issues acc_pv = P V for kColumns columns of V from `first` on.
template <typename C, int kColumns>
__device__ __forceinline__ void issue_pv_slice(float (&acc_pv)[kColumns / 2],
                                               const std::uint32_t (&p_frag)[C::kTileK / 32][4],
                                               SharedStorage<C>& s, int stage, int first) {
  using V = typename C::ValueTile;
  const std::uint64_t v =
      core::matrix_descriptor(shared_address(s.v[stage]) + first * core::kPanelRowBytes, 0);
  Wgmma<kColumns>::template rs_b_k_major<false>(acc_pv, p_frag[0], v);
#pragma unroll
  for (int step = 1; step < C::kTileK / 32; ++step) {
    Wgmma<kColumns>::template rs_b_k_major<true>(acc_pv, p_frag[step],
                                                 core::advance(v, V::k_offset(step)));
  }
  wgmma_commit();
}

/// O = rescale O + v_scale P V for a slice of columns. kScaled: v_scale may differ from 1.
template <typename C, int kColumns, bool kScaled>
__device__ __forceinline__ void accumulate_pv_slice(AccO<C>& acc_o, float (&acc_pv)[kColumns / 2],
                                                    int first, const float (&rescale)[2],
                                                    float v_scale) {
  fence_registers(acc_pv);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    float& x = acc_o[first / 2 + i];
    x = fmaf(x, rescale[i / 2 % 2], kScaled ? acc_pv[i] * v_scale : acc_pv[i]);
  }
}

/// O = rescale O + v_scale P V, slice by slice.
template <typename C, bool kScaled>
__device__ __forceinline__ void accumulate_pv(AccO<C>& acc_o,
                                              const std::uint32_t (&p_frag)[C::kTileK / 32][4],
                                              SharedStorage<C>& s, int stage,
                                              const float (&rescale)[2], float v_scale) {
  constexpr int kColumns = C::kHeadDim < C::kPvSliceColumns ? C::kHeadDim : C::kPvSliceColumns;
#pragma unroll
  for (int first = 0; first < C::kHeadDim; first += kColumns) {
    float acc_pv[kColumns / 2];
    wgmma_fence();
    issue_pv_slice<C, kColumns>(acc_pv, p_frag, s, stage, first);
    wgmma_wait<0>();
    accumulate_pv_slice<C, kColumns, kScaled>(acc_o, acc_pv, first, rescale, v_scale);
  }
}

/// The scale of a tile of V, if V has block scales.
template <typename C>
__device__ __forceinline__ float v_block_scale(const AttentionParams& p, const WorkTile& work,
                                               std::int32_t tile) {
  if (!p.v_scale.is_per_block()) return 1.f;
  return core::row_scale(p, p.v_element, p.v_scale, work.b, work.kv_head, tile * C::kTileK);
}

/// Multiplies scores by the block scales of K. Eight neighbouring keys share one.
template <typename C>
__device__ __forceinline__ void scale_by_k_blocks(AccS<C>& acc_s, const AttentionParams& p,
                                                  const WorkTile& work, std::int32_t tile) {
  const int head = work.kv_head;
#pragma unroll 1
  for (int n = 0; n < C::kTileK / 8; ++n) {
    const std::int32_t key = min(tile * C::kTileK + 8 * n, work.seq.kv_len - 1);
    const float scale = core::row_scale(p, p.k_element, p.k_scale, work.b, head, key);
#pragma unroll
    for (int m = 0; m < C::kTileK / 8; ++m) {  // registers have no run-time index
      if (m != n) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) acc_s[4 * m + i] *= scale;
    }
  }
}

/// The score scales of a work tile, and its softmax.
template <typename C, bool kFastPath>
struct Fp8TileScales {
  float common;          // of all scores
  float of_row[2];       // of a thread's rows, with Q's block scales
  bool left_to_softmax;  // the softmax multiplies by `common`, which must be positive
  float unit;            // natural unit of the scores that the softmax gets

  Fp8TileScales() = default;
  __device__ __forceinline__ Fp8TileScales(const SharedStorage<C>& s, const AttentionParams& p,
                                           int stage, const Thread<C>& t) {
    const WorkTile& work = s.work_tiles[stage];
    common = s.score_scale[stage];
    of_row[0] = of_row[1] = common;
    if (!kFastPath && p.q_scale.is_per_block()) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int32_t query = min(work.first_query + t.row(half), work.seq.q_len - 1);
        of_row[half] *= core::row_scale(p, p.q_element, p.q_scale, work.b, work.head, query);
      }
    }
    left_to_softmax = kFastPath && common > 0.f;
    unit = !kFastPath ? static_cast<float>(core::kLn2) : left_to_softmax ? common : 1.f;
  }

  __device__ __forceinline__ void softmax(AccS<C>& acc_s, RowStats& row_stats, float (&rescale)[2],
                                          const Thread<C>& t, const Params& params,
                                          const WorkTile& work, std::int32_t tile,
                                          bool needs_mask) const {
    const AttentionParams& p = params.call;
    if (!kFastPath && p.k_scale.is_per_block()) scale_by_k_blocks<C>(acc_s, p, work, tile);
    if (kFastPath && !left_to_softmax) {
#pragma unroll
      for (int i = 0; i < C::kTileK / 2; ++i) acc_s[i] *= common;
    }
    if constexpr (!kFastPath) {
      apply_score_mods<C>(acc_s, t, params, work, tile, [&](int half) { return of_row[half]; });
    }
    if (needs_mask) apply_mask<C>(acc_s, t, work, tile);
    if constexpr (kFastPath) {
      const LinearExponent exponent{unit * static_cast<float>(core::kLog2E)};
      online_softmax<C>(acc_s, row_stats, rescale, exponent, p.fault);
    } else {
      online_softmax<C>(acc_s, row_stats, rescale, Log2Exponent{}, p.fault);
    }
  }
};

/// The fp8 consumer warp.
template <typename C, Path kPath>
struct Fp8Consumer : ConsumerWarp<C> {
  static constexpr bool kFastPath = is_fast(kPath);
  using Pipeline = typename C::Pipeline;
  using Iterator = typename ConsumerWarp<C>::Iterator;
  static constexpr bool kQkAhead = C::kShape.issues_qk_ahead();
  std::uint32_t p_frag[C::kTileK / 32][4];
  TileQueueState queue;  // the work tile
  Fp8TileScales<C, kFastPath> scales;

  __device__ __forceinline__ Fp8Consumer(SharedStorage<C>& s, const Params& params)
      : ConsumerWarp<C>(s, params, Thread<C>(threadIdx.x)) {}

  __device__ __forceinline__ void begin_tile(TileQueueState begun) {
    queue = begun;
    scales = Fp8TileScales<C, kFastPath>(this->s, this->params.call, begun.stage(), this->t);
    this->row_stats = init_row_stats();
#pragma unroll
    for (int i = 0; i < C::kHeadDim / 2; ++i) this->acc_o[i] = 0.f;
  }

  __device__ __forceinline__ void softmax(const Iterator& it, bool needs_mask) {
    scales.softmax(this->acc_s, this->row_stats, this->rescale, this->t, this->params,
                   this->work(queue), it.tile, needs_mask);
  }
  __device__ __forceinline__ void pack_p() { pack_p_fp8<C>(p_frag, this->acc_s); }

  /// O = rescale O + P V.
  __device__ __forceinline__ void add_pv(typename Pipeline::KvState v_state, std::int32_t tile) {
    const float v_scale =
        kFastPath ? 1.f : v_block_scale<C>(this->params.call, this->work(queue), tile);
    accumulate_pv<C, !kFastPath>(this->acc_o, p_frag, this->s, v_state.stage(), this->rescale,
                                 v_scale);
  }

  __device__ __forceinline__ void stash_row_stats(TileQueueState) {
    sm90::stash_row_stats<C>(this->s, this->row_stats, this->t,
                             [&](float max) { return max * scales.unit; });
  }
  /// Epilogue.
  __device__ __forceinline__ void store_tile(TileQueueState ended) {
    store_output<C, kPath>(this->acc_o, this->s, this->params.call, this->work(ended), this->t,
                           this->s.output_scale[ended.stage()]);
  }
};

}  // namespace flashcore::cuda::sm90
