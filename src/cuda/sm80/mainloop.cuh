// The mainloop: KV tiles of a work tile through the K and V pipelines, one step for each tile.
#pragma once

#include "cuda/primitives/compiler.cuh"
#include "cuda/sm80/dequant.cuh"
#include "cuda/sm80/epilogue.cuh"
#include "cuda/sm80/load.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/plain_steps.cuh"
#include "cuda/sm80/score.cuh"
#include "cuda/sm80/softmax.cuh"

namespace flashcore::cuda::sm80 {

/// Barrier of the threads that read a tile: their copies have arrived, and no thread reads the
/// previous contents any more.
template <typename C>
__device__ __forceinline__ void sync_tile() {
  if constexpr (C::kWarpPrivateKv) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

/// kKeys keys of a step, the n-th of the warp's share on: S = Q K^T, softmax, O += P V. Between the
/// GEMMs it waits for V and refills the stage of K.
template <typename C, bool kFastPath, int kKeys>
__device__ __forceinline__ void mainloop_step(SharedStorage<C>& s, AccO<C>& acc_o,
                                              const QFragments<C, kFastPath>& q,
                                              const AttentionParams& p, const Thread<C>& t,
                                              const WarpKeys& keys, MaskBits<C>& bits, int stage,
                                              std::int32_t tile, int n) {
  const int s_key = t.warp_n * C::kWarpKeys + n;
  const std::int32_t first_key = tile + s_key;
  bool visible = first_key < keys.visible.end && first_key + kKeys > keys.visible.begin;
  if constexpr (C::template kReadsMask<kFastPath> && !C::kEarlyMask) {
    if (visible && p.has_mask()) load_mask_bits<C, kKeys>(bits, s, p, t, first_key);
  }
  visible = visible && shows_any_key<C, kFastPath, kKeys>(p, bits);
  AccS<C, kKeys> acc_s = {};
  if (visible) {
    if constexpr (C::kKv8) {
      gemm_qk_kv8<C, kFastPath, kKeys>(acc_s, q, s, p, stage, s_key, t);
      scale_scores<C, kKeys>(acc_s, s, p, stage, s_key, t);
    } else {
      gemm_qk<C, kFastPath, kKeys>(acc_s, q, s, s.k[stage], s_key, t);
    }
    apply_mods_and_mask<C, kFastPath, kKeys>(acc_s, t, s, p, keys, bits, first_key);
  }
  const bool is_first = n == 0, is_last = n + kKeys == C::kWarpKeys;
  if (is_first) cp_async_wait<2 * C::kStages - 2>();
  if (is_first || is_last) sync_tile<C>();
  if (is_last) load_k<C, kFastPath>(s, p, s.work, stage, tile + C::kStages * C::kTileK);
  if (!visible) return;
  RowStats<C> row_stats = s.row_stats[threadIdx.x];
  online_softmax<C, kFastPath, kKeys>(acc_s, acc_o, row_stats, s.work.unit_log2, p);
  // The general path has no register for the address.
  s.row_stats[kFastPath ? threadIdx.x : opaque(threadIdx.x)] = row_stats;
  if constexpr (C::kKv8) {
    scale_p<C, kKeys>(acc_s, s, p, stage, s_key, t);
    gemm_pv_kv8<C, kKeys>(acc_o, acc_s, s, p, stage, s_key, t);
  } else {
    gemm_pv<C, kKeys>(acc_o, acc_s, s.v[stage], s_key, t);
  }
}

/// Waits for K of a step. The first step also waits for Q; later ones request V of the tile that
/// the stage before theirs gets.
template <typename C, bool kFastPath>
__device__ __forceinline__ void begin_step(SharedStorage<C>& s, const AttentionParams& p,
                                           QFragments<C, kFastPath>& q, int stage,
                                           std::int32_t tile, bool is_first) {
  if (is_first) {
    cp_async_wait<2 * C::kStages - 1>();
    __syncthreads();  // other warps have loaded Q too
    load_q_fragments<C, kFastPath>(q, s);
  } else {
    cp_async_wait<2 * C::kStages - 2>();
    sync_tile<C>();
    const int last_stage = stage == 0 ? C::kStages - 1 : stage - 1;
    load_v<C, kFastPath>(s, p, s.work, last_stage, tile + (C::kStages - 1) * C::kTileK);
  }
}

/// begin: first key of the first KV tile.
template <typename C, bool kFastPath>
__device__ __forceinline__ void mainloop(SharedStorage<C>& s, const AttentionParams& p,
                                         std::int32_t begin) {
  constexpr int kKeys = C::kKeysPerPass;
  AccO<C> acc_o = {};
  QFragments<C, kFastPath> q;
  RowStats<C>& row_stats = s.row_stats[threadIdx.x];
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
    row_stats.of[m][0] = row_stats.of[m][1] = {core::negative_infinity<float>(), 0.f};
  }
  int stage = 0;
  std::int32_t tile = begin;
#pragma unroll 1
  while (tile < s.work.visible.end) {
    MaskBits<C> bits;
    load_early_mask<C, kFastPath>(bits, s, p, tile);
    // Not every path has a register for `begin`.
    const bool is_first = kFastPath && !C::template kHasPlainSteps<kFastPath>
                              ? tile == begin
                              : tile <= s.work.visible.begin;
    begin_step<C, kFastPath>(s, p, q, stage, tile, is_first);
    if constexpr (C::template kHasPlainSteps<kFastPath>) {
      if (tile >= s.work.fully_visible.begin && tile < s.plain_end) {
        tile = run_plain_steps<C>(s, p, acc_o, tile);
        continue;
      }
      bits = {};  // or ptxas would keep them through the plain steps
    }
#pragma unroll 1
    for (int n = 0; n < C::kWarpKeys; n += kKeys) {
      const Thread<C> t(opaque(threadIdx.x));
      mainloop_step<C, kFastPath, kKeys>(s, acc_o, q, p, t, s.warp_keys[t.warp_m], bits, stage,
                                         tile, n);
    }
    tile += C::kTileK;
    stage = stage == C::kStages - 1 ? 0 : stage + 1;
  }
  cp_async_wait<0>();
  const Thread<C> t(threadIdx.x);
  if constexpr (C::kWarpsN == 1) {
    if (stores_from_accumulators<C, kFastPath>(p)) {
      store_accumulators<C, kFastPath>(acc_o, row_stats, s, p, s.work, t);
      return;
    }
  }
  epilogue_cta<C, kFastPath>(s, p, acc_o, row_stats, t);
}

}  // namespace flashcore::cuda::sm80
