// The mainloop for up to 8 rows, with swapped MMA operands (mma.cuh). All per-thread state fits in
// registers. The softmax precedes the wait for V, so that only P V and the combine follow the last
// load. Issuing loads earlier, as soon as a stage is free, is slower.
#pragma once

#include "cuda/sm80/cluster_combine_warps.cuh"
#include "cuda/sm80/mainloop.cuh"

namespace flashcore::cuda::sm80 {

/// begin: first key of the first KV tile.
template <typename C, bool kFastPath>
__device__ __forceinline__ void mainloop_swap_ab(SharedStorage<C>& s, const AttentionParams& p,
                                                 std::int32_t begin) {
  static_assert(C::kWarpPrivateKv && C::kEarlyMask);
  constexpr int kKeys = C::kKeysPerPass;
  constexpr int kCopies = 2 * C::kStages;  // K and V of all stages
  const WorkTile& work = s.work;
  const Thread<C> t(threadIdx.x);
  const WarpKeys keys = s.warp_keys[0];
  const bool from_warps = combines_from_warps<C>(p, work);
  const std::int32_t end = work.visible.end;
  WarpExchange<C> exchange;
  if constexpr (kHasClusters) {
    if (from_warps) exchange.init(s, p, work, t);
  }
  AccO<C> acc_o = {};
  RowStats<C> row_stats;
  row_stats.of[0][0] = row_stats.of[0][1] = {core::negative_infinity<float>(), 0.f};
  QFragments<C, kFastPath> q;
  int stage = 0;
#pragma unroll 1
  for (std::int32_t tile = begin; tile < end; tile += C::kTileK) {
    MaskBits<C> bits;
    load_early_mask<C, kFastPath>(bits, s, p, tile);
    if (tile == begin) {
      cp_async_wait<kCopies - 1>();
      __syncthreads();  // other warps have loaded Q too
      load_q_fragments<C, kFastPath>(q, s);
    } else {
      cp_async_wait<kCopies - 2>();
      __syncwarp();
      const int last_stage = stage == 0 ? C::kStages - 1 : stage - 1;
      load_v<C, kFastPath>(s, p, work, last_stage, tile + (C::kStages - 1) * C::kTileK);
    }
#pragma unroll 1
    for (int n = 0; n < C::kWarpKeys; n += kKeys) {
      const int s_key = t.warp_n * C::kWarpKeys + n;
      const std::int32_t first_key = tile + s_key;
      const bool visible = first_key < keys.visible.end && first_key + kKeys > keys.visible.begin &&
                           shows_any_key<C, kFastPath, kKeys>(p, bits);
      const bool is_first = n == 0, is_last = n + kKeys == C::kWarpKeys;
      AccS<C, kKeys> acc_s = {};
      if (visible) {
        gemm_qk<C, kFastPath, kKeys>(acc_s, q, s, s.k[stage], s_key, t);
        apply_mods_and_mask<C, kFastPath, kKeys>(acc_s, t, s, p, keys, bits, first_key);
        online_softmax<C, kFastPath, kKeys>(acc_s, acc_o, row_stats, work.unit_log2, p);
      }
      if constexpr (kHasClusters) {
        if (from_warps && is_last && tile + C::kTileK >= end)
          send_row_stats<C>(exchange, row_stats, work, t);
      }
      if (is_first) cp_async_wait<kCopies - 2>();
      if (is_first || is_last) __syncwarp();
      if (is_last) load_k<C, kFastPath>(s, p, work, stage, tile + C::kStages * C::kTileK);
      if (visible) gemm_pv_swap_ab<C, kKeys>(acc_o, acc_s, s.v[stage], s_key, t);
    }
    stage = stage == C::kStages - 1 ? 0 : stage + 1;
  }
  cp_async_wait<0>();
  if constexpr (kHasClusters) {
    if (from_warps) {
      const WarpExchangeThread<C, kFastPath> thread{{s, p, work}, exchange, row_stats, acc_o, t};
      core::combine_from_warps(thread, begin < end);
      return;
    }
  }
  epilogue_cta<C, kFastPath>(s, p, acc_o, row_stats, t);
}

}  // namespace flashcore::cuda::sm80
