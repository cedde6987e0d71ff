// Attention forward on tensor cores (mma.sync, sm_80 and up): softmax(Q K^T) V in one kernel, for
// prefill and for decode, every option.
//
//   grid     one block per (key range, batch, KV head, tile of query rows). The query heads of a
//            GQA group share K and V, so they share a block: row r of a KV head is query r / group
//            of head r % group
//   block    kRowWarps × kKeyWarps warps. A warp owns 8, 16 or 32 rows of the tile and, of each
//            step's tile_k keys, its own share; with kKeyWarps > 1 the shares are joined at the end
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
#include "cuda/sm80/dequant.cuh"
#include "cuda/sm80/config.cuh"
#include "cuda/sm80/mma_swap_ab.cuh"
#include "cuda/sm80/work_tile.cuh"
#include "cuda/sm80/combine.cuh"
#include "cuda/sm80/load.cuh"
#include "cuda/sm80/epilogue.cuh"
#include "cuda/sm80/score.cuh"
#include "cuda/sm80/softmax.cuh"
#include "cuda/sm80/cluster_combine_warps.cuh"

namespace flashcore::cuda::sm80 {

/// Everybody who reads a tile has come here: its copies are there, and its last reader is done.
template <typename C>
__device__ __forceinline__ void sync_tile() {
  if constexpr (C::kOwnKeys) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

/// kKeys keys of a step, from row s_key of its tiles on: between the products V is waited for, and
/// K's place is filled again.
template <typename C, bool kPlain, int kKeys>
__device__ __forceinline__ void attend_keys(SharedStorage<C>& s, Outputs<C>& o,
                                            RowStates<C>& states, const KeptQueries<C, kPlain>& q,
                                            const AttentionParams& p, const Thread<C>& t,
                                            const WarpKeys& keys, int stage, std::int32_t tile,
                                            int n) {
  const int s_key = t.key_warp * C::kWarpKeys + n;
  const std::int32_t first_key = tile + s_key;
  const bool seen = first_key < keys.seen.end && first_key + kKeys > keys.seen.begin;
  Scores<C, kKeys> score = {};
  if (seen) {
    if constexpr (C::kCodes) {
      multiply_queries_by_codes<C, kPlain, kKeys>(score, q, s, p, stage, s_key, t);
      scale_scores<C, kKeys>(score, s, p, stage, s_key, t);
    } else {
      multiply_queries<C, kPlain, kKeys>(score, q, s, s.k[stage], s_key, t);
    }
    finish_scores<C, kPlain, kKeys>(score, t, p, s.item, keys, first_key);
  }
  const bool begins = n == 0, ends = n + kKeys == C::kWarpKeys;
  if (begins) wait_copies<2 * C::kStages - 2>();
  if (begins || ends) sync_tile<C>();
  if (ends) load_keys<C, kPlain>(s, p, s.item, stage, tile + C::kStages * C::kTileK);
  if (!seen) return;
  softmax<C, kPlain, kKeys>(score, o, states, s.item.log2_unit, p.plant);
  if constexpr (C::kCodes) {
    scale_probabilities<C, kKeys>(score, s, p, stage, s_key, t);
    multiply_codes<C, kKeys>(o, score, s, p, stage, s_key, t);
  } else {
    multiply_values<C, kKeys>(o, score, s.v[stage], s_key, t);
  }
}

/// What follows the loop where the block joins its warps' results.
template <typename C, bool kPlain>
__device__ __forceinline__ void finish_block(SharedStorage<C>& s, const AttentionParams& p,
                                             const Outputs<C>& o, const RowStates<C>& states,
                                             const Thread<C>& t) {
  if constexpr (C::kOwnKeys && kHasClusters) {
    if (p.joins_in_cluster) {
      const ClusterRoute<C> route(s, p, s.item);
      leave_results<C>(s, o, states, t);
      const PieceThread<C, kPlain> thread{{s, p, s.item}};
      core::exchange_pieces(thread, route.recipient, route.joined);
      return;
    }
  }
  leave_results<C>(s, o, states, t);
  if constexpr (kPlain && C::kTileQ <= 32) {
    finish_item<C, true>(s, p);
  } else {
    finish_item_apart<C>(s, p);
  }
}

template <typename C, bool kPlain>
__device__ __forceinline__ void attend(SharedStorage<C>& s, const AttentionParams& p,
                                       std::int32_t begin) {
  Outputs<C> o = {};
  KeptQueries<C, kPlain> q;
  RowStates<C>& states = s.states[threadIdx.x];
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
    states.of[m][0] = states.of[m][1] = {core::negative_infinity<float>(), 0.f};
  }
  int stage = 0;
#pragma unroll 1
  for (std::int32_t tile = begin; tile < s.item.seen.end; tile += C::kTileK) {
    if (tile == begin) {
      wait_copies<2 * C::kStages - 1>();
      __syncthreads();  // Q too
      keep_queries<C, kPlain>(q, s);
    } else {
      wait_copies<2 * C::kStages - 2>();
      sync_tile<C>();
      const int last_stage = stage == 0 ? C::kStages - 1 : stage - 1;
      load_values<C, kPlain>(s, p, s.item, last_stage, tile + (C::kStages - 1) * C::kTileK);
    }
    constexpr int kKeys = kPlain ? C::kPlainKeys : C::kOptionKeys;
#pragma unroll 1
    for (int n = 0; n < C::kWarpKeys; n += kKeys) {
      const Thread<C> t(not_hoisted(threadIdx.x));
      attend_keys<C, kPlain, kKeys>(s, o, states, q, p, t, s.warp_keys[t.row_warp], stage, tile, n);
    }
    stage = stage == C::kStages - 1 ? 0 : stage + 1;
  }
  wait_copies<0>();
  const Thread<C> t(threadIdx.x);
  if constexpr (C::kKeyWarps == 1) {
    if (p.splits == 1 && (kPlain || (p.vector_rows && p.out_element != core::Element::f32))) {
      write_accumulators<C, kPlain>(o, states, s, p, s.item, t);
      return;
    }
  }
  finish_block<C, kPlain>(s, p, o, states, t);
}

/// The same for 8 rows or fewer, which leave registers for all that a thread needs. Behind the last
/// V there is nothing but its product and the join: the softmax comes before. To ask for K or V as
/// soon as there is room was slower (docs/performance.md), we think because more copies under way
/// do not make memory faster, but some warps wait longer than others.
template <typename C, bool kPlain>
__device__ __forceinline__ void attend_few_rows(SharedStorage<C>& s, const AttentionParams& p,
                                                std::int32_t begin) {
  static_assert(C::kOwnKeys);
  constexpr int kKeys = kPlain ? C::kPlainKeys : C::kOptionKeys;
  constexpr int kCopies = 2 * C::kStages;  // K and V of all stages
  const Item& item = s.item;
  const Thread<C> t(threadIdx.x);
  const WarpKeys keys = s.warp_keys[0];
  const bool by_warps = warps_join<C>(p, item);
  const std::int32_t end = item.seen.end;
  WarpRoute<C> route;
  if constexpr (kHasClusters) {
    if (by_warps) route.find(s, p, item, t);
  }
  Outputs<C> o = {};
  RowStates<C> states;
  states.of[0][0] = states.of[0][1] = {core::negative_infinity<float>(), 0.f};
  KeptQueries<C, kPlain> q;
  int stage = 0;
#pragma unroll 1
  for (std::int32_t tile = begin; tile < end; tile += C::kTileK) {
    if (tile == begin) {
      wait_copies<kCopies - 1>();
      __syncthreads();  // Q too
      keep_queries<C, kPlain>(q, s);
    } else {
      wait_copies<kCopies - 2>();
      __syncwarp();
      const int last_stage = stage == 0 ? C::kStages - 1 : stage - 1;
      load_values<C, kPlain>(s, p, item, last_stage, tile + (C::kStages - 1) * C::kTileK);
    }
#pragma unroll 1
    for (int n = 0; n < C::kWarpKeys; n += kKeys) {
      const int s_key = t.key_warp * C::kWarpKeys + n;
      const std::int32_t first_key = tile + s_key;
      const bool seen = first_key < keys.seen.end && first_key + kKeys > keys.seen.begin;
      const bool begins = n == 0, ends = n + kKeys == C::kWarpKeys;
      Scores<C, kKeys> score = {};
      if (seen) {
        multiply_queries<C, kPlain, kKeys>(score, q, s, s.k[stage], s_key, t);
        finish_scores<C, kPlain, kKeys>(score, t, p, item, keys, first_key);
        softmax<C, kPlain, kKeys>(score, o, states, item.log2_unit, p.plant);
      }
      if constexpr (kHasClusters) {
        if (by_warps && ends && tile + C::kTileK >= end) send_states<C>(route, states, item, t);
      }
      if (begins) wait_copies<kCopies - 2>();
      if (begins || ends) __syncwarp();
      if (ends) load_keys<C, kPlain>(s, p, item, stage, tile + C::kStages * C::kTileK);
      if (seen) multiply_few_rows<C, kKeys>(o, score, s.v[stage], s_key, t);
    }
    stage = stage == C::kStages - 1 ? 0 : stage + 1;
  }
  wait_copies<0>();
  if constexpr (kHasClusters) {
    if (by_warps) {
      const PartThread<C, kPlain> thread{{s, p, item}, route, states, o, t};
      core::exchange_parts(thread, begin < end);
      return;
    }
  }
  finish_block<C, kPlain>(s, p, o, states, t);
}

/// One item. kPlain: see AttentionParams::plain.
template <typename C, bool kPlain>
__device__ __forceinline__ void run_item(SharedStorage<C>& s, const AttentionParams& p) {
  if (p.has_lengths) wait_for_previous_kernel();
  // Every thread finds out by itself what to load; later it reads thread 0's copy.
  const Item item = describe_item<C, kPlain>(p, blockIdx.x);
  if (p.has_lengths && threadIdx.x == 0) report(p, item.sequence.error);
  if (!core::has_range(item.rows, item.split, item.splits)) {
    wait_for_previous_kernel();
    if (item.rows > 0) leave_nothing(p, item);
    return;
  }
  const std::int32_t begin = core::tile_begin(item.seen.begin, C::kTileK);
  // The kernel before is waited for as late as can be; then keys go first, for they are what takes
  // longest.
  copy_keys<C, kPlain>(s, p, item, 0, begin, ForPreviousKernel());
  if constexpr (!C::kCodes) load_queries<C, kPlain>(s, p, item);
  commit_copies();
  load_values<C, kPlain>(s, p, item, 0, begin);
#pragma unroll 1
  for (int stage = 1; stage < C::kStages; ++stage) {
    load_keys<C, kPlain>(s, p, item, stage, begin + stage * C::kTileK);
    load_values<C, kPlain>(s, p, item, stage, begin + stage * C::kTileK);
  }
  if constexpr (C::kCodes) {  // while those copies are under way
    const FoundScales scales = find_scales<C>(p, item);
    load_paired_queries<C, kPlain>(s, p, item, scales.of_row);
    leave_scales<C>(s, scales, p, item);
  }
  if (threadIdx.x == 0) s.item = item;
  if (item.split == 0 && item.kv_head == 0 && item.first_row == 0) {
    report_pages(p, item.sequence, item.b);
  }
  if (C::kRowWarps == 1) {
    if (threadIdx.x == 0) s.warp_keys[0] = {item.seen, item.all};
  } else if (threadIdx.x < C::kRowWarps) {
    const int first = threadIdx.x * C::kWarpRows;
    s.warp_keys[threadIdx.x] =
        first < item.rows ? keys_of_rows(p, item, first, min(first + C::kWarpRows, item.rows) - 1)
                          : WarpKeys{};
  }
  __syncthreads();
  if constexpr (C::kOwnKeys && kHasClusters) {
    if (p.joins_in_cluster) {
      const ClusterThread<C> thread{s, p, item};
      core::open_inbox(thread, warps_join<C>(p, item));
    }
  }
  if constexpr (C::kFewRows) {
    attend_few_rows<C, kPlain>(s, p, begin);
  } else {
    attend<C, kPlain>(s, p, begin);
  }
}

/// Apart, so that the common parts of the two ways are not merged: then registers would spill.
template <typename C>
__device__ __noinline__ void run_with_options(SharedStorage<C>& s, const AttentionParams& p) {
  run_item<C, false>(s, p);
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    attention(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char s_bytes[];
  SharedStorage<C>& s = *reinterpret_cast<SharedStorage<C>*>(s_bytes);
  let_next_kernel_start();
  if (p.plain) {
    run_item<C, true>(s, p);
  } else {
    run_with_options<C>(s, p);
  }
}

}  // namespace flashcore::cuda::sm80
