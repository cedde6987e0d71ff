// Attention forward on tensor cores (mma.sync, sm_80 and up): softmax(Q K^T) V in one kernel, for
// prefill and for decode, every option.
//
//   grid     one block per (key range, batch, KV head, tile of query rows). The query heads of a
//            GQA group share K and V, so they share a block: row r of a KV head is query r / group
//            of head r % group
//   block    kWarpsM × kWarpsN warps. A warp owns 8, 16 or 32 rows of the tile and, of each
//            step's tile_k keys, its own share; with kWarpsN > 1 the shares are joined at the end
//   steps    tile_k keys at a time through rings of kStages K and V tiles, filled by cp.async
//   scores   stay in registers: S is the accumulator of Q K^T and, packed to 16 bits, the A operand
//            of P V; of 8 rows or fewer, transposed, the B operand of V^T P^T (few_rows.cuh)
//   smem     Q tile, rings of K and V tiles, all swizzled (core/mma_layout.h); when the loop is
//            over, the results in their place
//   8 bits   K and V may be codes (C::kCodes): their tiles stay so, and become 16-bit operands in
//            registers (codes.cuh)
#pragma once

#include <cuda_runtime.h>

#include "cuda/primitives/report.cuh"
#include "cuda/sm80/cluster_combine_warps.cuh"
#include "cuda/sm80/combine.cuh"
#include "cuda/sm80/config.cuh"
#include "cuda/sm80/dequant.cuh"
#include "cuda/sm80/epilogue.cuh"
#include "cuda/sm80/load.cuh"
#include "cuda/sm80/mma_swap_ab.cuh"
#include "cuda/sm80/score.cuh"
#include "cuda/sm80/softmax.cuh"
#include "cuda/sm80/work_tile.cuh"

namespace flashcore::cuda::sm80 {

/// Everybody who reads a tile has come here: its copies are there, and its last reader is done.
template <typename C>
__device__ __forceinline__ void sync_tile() {
  if constexpr (C::kWarpPrivateKv) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

/// kKeys keys of a step, from row s_key of its tiles on: between the products V is waited for, and
/// K's place is filled again.
template <typename C, bool kFastPath, int kKeys>
__device__ __forceinline__ void mainloop_step(SharedStorage<C>& s, AccO<C>& acc_o,
                                              RowStats<C>& states,
                                              const QFragments<C, kFastPath>& q,
                                              const AttentionParams& p, const Thread<C>& t,
                                              const WarpKeys& keys, int stage, std::int32_t tile,
                                              int n) {
  const int s_key = t.warp_n * C::kWarpKeys + n;
  const std::int32_t first_key = tile + s_key;
  const bool visible = first_key < keys.visible.end && first_key + kKeys > keys.visible.begin;
  AccS<C, kKeys> acc_s = {};
  if (visible) {
    if constexpr (C::kKv8) {
      gemm_qk_kv8<C, kFastPath, kKeys>(acc_s, q, s, p, stage, s_key, t);
      scale_scores<C, kKeys>(acc_s, s, p, stage, s_key, t);
    } else {
      gemm_qk<C, kFastPath, kKeys>(acc_s, q, s, s.k[stage], s_key, t);
    }
    apply_mods_and_mask<C, kFastPath, kKeys>(acc_s, t, p, s.item, keys, first_key);
  }
  const bool begins = n == 0, ends = n + kKeys == C::kWarpKeys;
  if (begins) cp_async_wait<2 * C::kStages - 2>();
  if (begins || ends) sync_tile<C>();
  if (ends) load_keys<C, kFastPath>(s, p, s.item, stage, tile + C::kStages * C::kTileK);
  if (!visible) return;
  softmax<C, kFastPath, kKeys>(acc_s, acc_o, states, s.item.unit_log2, p.fault);
  if constexpr (C::kKv8) {
    scale_probabilities<C, kKeys>(acc_s, s, p, stage, s_key, t);
    gemm_pv_kv8<C, kKeys>(acc_o, acc_s, s, p, stage, s_key, t);
  } else {
    gemm_pv<C, kKeys>(acc_o, acc_s, s.v[stage], s_key, t);
  }
}

/// What follows the loop where the block joins its warps' results.
template <typename C, bool kFastPath>
__device__ __forceinline__ void epilogue_cta(SharedStorage<C>& s, const AttentionParams& p,
                                             const AccO<C>& acc_o, const RowStats<C>& states,
                                             const Thread<C>& t) {
  if constexpr (C::kWarpPrivateKv && kHasClusters) {
    if (p.cluster_combine) {
      const ClusterExchange<C> route(s, p, s.item);
      stage_output<C>(s, acc_o, states, t);
      const PieceThread<C, kFastPath> thread{{s, p, s.item}};
      core::combine_from_ctas(thread, route.recipient, route.joined);
      return;
    }
  }
  stage_output<C>(s, acc_o, states, t);
  if constexpr (kFastPath && C::kTileQ <= 32) {
    epilogue<C, true>(s, p);
  } else {
    epilogue_noinline<C>(s, p);
  }
}

template <typename C, bool kFastPath>
__device__ __forceinline__ void mainloop(SharedStorage<C>& s, const AttentionParams& p,
                                         std::int32_t begin) {
  AccO<C> acc_o = {};
  QFragments<C, kFastPath> q;
  RowStats<C>& states = s.states[threadIdx.x];
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
    states.of[m][0] = states.of[m][1] = {core::negative_infinity<float>(), 0.f};
  }
  int stage = 0;
#pragma unroll 1
  for (std::int32_t tile = begin; tile < s.item.visible.end; tile += C::kTileK) {
    if (tile == begin) {
      cp_async_wait<2 * C::kStages - 1>();
      __syncthreads();  // Q too
      load_q_fragments<C, kFastPath>(q, s);
    } else {
      cp_async_wait<2 * C::kStages - 2>();
      sync_tile<C>();
      const int last_stage = stage == 0 ? C::kStages - 1 : stage - 1;
      load_values<C, kFastPath>(s, p, s.item, last_stage, tile + (C::kStages - 1) * C::kTileK);
    }
    constexpr int kKeys = kFastPath ? C::kFastPathKeys : C::kGeneralPathKeys;
#pragma unroll 1
    for (int n = 0; n < C::kWarpKeys; n += kKeys) {
      const Thread<C> t(opaque(threadIdx.x));
      mainloop_step<C, kFastPath, kKeys>(s, acc_o, states, q, p, t, s.warp_keys[t.warp_m], stage,
                                         tile, n);
    }
    stage = stage == C::kStages - 1 ? 0 : stage + 1;
  }
  cp_async_wait<0>();
  const Thread<C> t(threadIdx.x);
  if constexpr (C::kWarpsN == 1) {
    if (p.splits == 1 && (kFastPath || (p.vector_rows && p.out_element != core::Element::f32))) {
      store_accumulators<C, kFastPath>(acc_o, states, s, p, s.item, t);
      return;
    }
  }
  epilogue_cta<C, kFastPath>(s, p, acc_o, states, t);
}

/// The same for 8 rows or fewer, which leave registers for all that a thread needs. Behind the last
/// V there is nothing but its product and the join: the softmax comes before. To ask for K or V as
/// soon as there is room was slower (docs/performance.md), we think because more copies under way
/// do not make memory faster, but some warps wait longer than others.
template <typename C, bool kFastPath>
__device__ __forceinline__ void mainloop_swap_ab(SharedStorage<C>& s, const AttentionParams& p,
                                                 std::int32_t begin) {
  static_assert(C::kWarpPrivateKv);
  constexpr int kKeys = kFastPath ? C::kFastPathKeys : C::kGeneralPathKeys;
  constexpr int kCopies = 2 * C::kStages;  // K and V of all stages
  const WorkTile& item = s.item;
  const Thread<C> t(threadIdx.x);
  const WarpKeys keys = s.warp_keys[0];
  const bool by_warps = combines_from_warps<C>(p, item);
  const std::int32_t end = item.visible.end;
  WarpRoute<C> route;
  if constexpr (kHasClusters) {
    if (by_warps) route.find(s, p, item, t);
  }
  AccO<C> acc_o = {};
  RowStats<C> states;
  states.of[0][0] = states.of[0][1] = {core::negative_infinity<float>(), 0.f};
  QFragments<C, kFastPath> q;
  int stage = 0;
#pragma unroll 1
  for (std::int32_t tile = begin; tile < end; tile += C::kTileK) {
    if (tile == begin) {
      cp_async_wait<kCopies - 1>();
      __syncthreads();  // Q too
      load_q_fragments<C, kFastPath>(q, s);
    } else {
      cp_async_wait<kCopies - 2>();
      __syncwarp();
      const int last_stage = stage == 0 ? C::kStages - 1 : stage - 1;
      load_values<C, kFastPath>(s, p, item, last_stage, tile + (C::kStages - 1) * C::kTileK);
    }
#pragma unroll 1
    for (int n = 0; n < C::kWarpKeys; n += kKeys) {
      const int s_key = t.warp_n * C::kWarpKeys + n;
      const std::int32_t first_key = tile + s_key;
      const bool visible = first_key < keys.visible.end && first_key + kKeys > keys.visible.begin;
      const bool begins = n == 0, ends = n + kKeys == C::kWarpKeys;
      AccS<C, kKeys> acc_s = {};
      if (visible) {
        gemm_qk<C, kFastPath, kKeys>(acc_s, q, s, s.k[stage], s_key, t);
        apply_mods_and_mask<C, kFastPath, kKeys>(acc_s, t, p, item, keys, first_key);
        softmax<C, kFastPath, kKeys>(acc_s, acc_o, states, item.unit_log2, p.fault);
      }
      if constexpr (kHasClusters) {
        if (by_warps && ends && tile + C::kTileK >= end) send_row_stats<C>(route, states, item, t);
      }
      if (begins) cp_async_wait<kCopies - 2>();
      if (begins || ends) __syncwarp();
      if (ends) load_keys<C, kFastPath>(s, p, item, stage, tile + C::kStages * C::kTileK);
      if (visible) gemm_pv_swap_ab<C, kKeys>(acc_o, acc_s, s.v[stage], s_key, t);
    }
    stage = stage == C::kStages - 1 ? 0 : stage + 1;
  }
  cp_async_wait<0>();
  if constexpr (kHasClusters) {
    if (by_warps) {
      const PartThread<C, kFastPath> thread{{s, p, item}, route, states, acc_o, t};
      core::combine_from_warps(thread, begin < end);
      return;
    }
  }
  epilogue_cta<C, kFastPath>(s, p, acc_o, states, t);
}

/// One item. kFastPath: see AttentionParams::plain.
template <typename C, bool kFastPath>
__device__ __forceinline__ void process_tile(SharedStorage<C>& s, const AttentionParams& p) {
  if (p.is_varlen) pdl_wait();
  // Every thread finds out by itself what to load; later it reads thread 0's copy.
  const WorkTile item = decode_work_tile<C, kFastPath>(p, blockIdx.x);
  if (p.is_varlen && threadIdx.x == 0) report(p, item.seq.error);
  if (!core::has_split(item.rows, item.split, item.splits)) {
    pdl_wait();
    if (item.rows > 0) store_empty_partials(p, item);
    return;
  }
  const std::int32_t begin = core::tile_begin(item.visible.begin, C::kTileK);
  // The kernel before is waited for as late as can be; then keys go first, for they are what takes
  // longest.
  copy_keys<C, kFastPath>(s, p, item, 0, begin, ForPreviousKernel());
  if constexpr (!C::kKv8) load_queries<C, kFastPath>(s, p, item);
  cp_async_commit();
  load_values<C, kFastPath>(s, p, item, 0, begin);
#pragma unroll 1
  for (int stage = 1; stage < C::kStages; ++stage) {
    load_keys<C, kFastPath>(s, p, item, stage, begin + stage * C::kTileK);
    load_values<C, kFastPath>(s, p, item, stage, begin + stage * C::kTileK);
  }
  if constexpr (C::kKv8) {  // while those copies are under way
    const FoundScales scales = find_scales<C>(p, item);
    load_paired_queries<C, kFastPath>(s, p, item, scales.of_row);
    leave_scales<C>(s, scales, p, item);
  }
  if (threadIdx.x == 0) s.item = item;
  if (item.split == 0 && item.kv_head == 0 && item.first_row == 0) {
    report_pages(p, item.seq, item.b);
  }
  if (C::kWarpsM == 1) {
    if (threadIdx.x == 0) s.warp_keys[0] = {item.visible, item.fully_visible};
  } else if (threadIdx.x < C::kWarpsM) {
    const int first = threadIdx.x * C::kWarpRows;
    s.warp_keys[threadIdx.x] =
        first < item.rows ? keys_of_rows(p, item, first, min(first + C::kWarpRows, item.rows) - 1)
                          : WarpKeys{};
  }
  __syncthreads();
  if constexpr (C::kWarpPrivateKv && kHasClusters) {
    if (p.cluster_combine) {
      const ClusterThread<C> thread{s, p, item};
      core::open_buffer(thread, combines_from_warps<C>(p, item));
    }
  }
  if constexpr (C::kSwapAB) {
    mainloop_swap_ab<C, kFastPath>(s, p, begin);
  } else {
    mainloop<C, kFastPath>(s, p, begin);
  }
}

/// Apart, so that the common parts of the two ways are not merged: then registers would spill.
template <typename C>
__device__ __noinline__ void process_general(SharedStorage<C>& s, const AttentionParams& p) {
  process_tile<C, false>(s, p);
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    fwd_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char s_bytes[];
  SharedStorage<C>& s = *reinterpret_cast<SharedStorage<C>*>(s_bytes);
  pdl_launch_dependents();
  if (p.fast_path) {
    process_tile<C, true>(s, p);
  } else {
    process_general<C>(s, p);
  }
}

}  // namespace flashcore::cuda::sm80
