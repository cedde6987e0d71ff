// Attention forward on Hopper's tensor cores (wgmma, sm_90a): softmax(Q K^T) V in one kernel, for
// many query rows.
//
//   grid     one block per SM, each working through its items: tile_q query rows of one head
//   block    one warpgroup loads (one thread of it, by TMA), the others compute, 64 rows each, with
//            the loader's registers
//   steps    tile_k keys at a time, from the last that is seen to the first, through rings of
//            kStages K and V tiles
//   overlap  the products of a step are issued before the softmax of the step before is needed:
//            S' = Q K'^T and O += P V run while the warpgroups, in turns, do their exponentials
//   scores   stay in registers: S is the accumulator of Q K^T and, packed to 16 bits, the A operand
//            of P V
//   barriers, shared memory: config.cuh
#pragma once

#include <cuda_runtime.h>

#include "cuda/primitives/hopper.cuh"
#include "cuda/primitives/wgmma.cuh"
#include "cuda/sm90/config.cuh"
#include "cuda/sm90/load.cuh"
#include "cuda/sm90/results.cuh"
#include "cuda/sm90/scores.cuh"
#include "cuda/sm90/softmax.cuh"

namespace flashcore::cuda::sm90 {

/// score = Q K^T, begun.
template <typename C>
__device__ __forceinline__ void begin_scores(Scores<C>& score, SharedStorage<C>& s, int group,
                                             int stage) {
  using Q = typename C::QueryTile;
  using K = typename C::KeyTile;
  const std::uint64_t q =
      core::matrix_descriptor(shared_address(s.q) + group * 64 * core::kPanelRowBytes, 0);
  const std::uint64_t k = core::matrix_descriptor(shared_address(s.k[stage]), 0);
#pragma unroll
  for (int step = 0; step < C::kHeadDim / 16; ++step) {
    Wgmma<C::kTileK>::template products<typename C::Element>(
        score, core::advance(q, Q::along_rows(step)), core::advance(k, K::along_rows(step)),
        step > 0);
  }
  commit_products();
}

/// O += P V, or = P V, begun.
template <typename C>
__device__ __forceinline__ void begin_output(Outputs<C>& o,
                                             const std::uint32_t (&a)[C::kTileK / 16][4],
                                             SharedStorage<C>& s, int stage, bool adds) {
  using V = typename C::KeyTile;
  const std::uint64_t v = core::matrix_descriptor(shared_address(s.v[stage]), V::kPanelBytes);
#pragma unroll
  for (int step = 0; step < C::kTileK / 16; ++step) {
    Wgmma<C::kHeadDim>::template products<typename C::Element>(
        o, a[step], core::advance(v, V::across_rows(step)), adds || step > 0);
  }
  commit_products();
}

__device__ __forceinline__ void arrive_once_per_warp(std::uint64_t& s_barrier, int lane) {
  __syncwarp();
  if (lane == 0) arrive(s_barrier);
}

/// Zeros in place of what lies behind the last key: its weights are 0, but 0 · NaN is NaN.
template <typename C>
__device__ __forceinline__ void clear_tail(SharedStorage<C>& s, int stage, int keys) {
  constexpr int kPieces = core::kPanelRowBytes / 16;
  const int thread = threadIdx.x - 128;
  for (int i = thread; i < (C::kTileK - keys) * kPieces * C::KeyTile::kPanels;
       i += 128 * C::kConsumers) {
    const int row = keys + i / kPieces % (C::kTileK - keys);
    const int panel = i / kPieces / (C::kTileK - keys);
    unsigned char* s_row =
        s.v[stage] + panel * C::KeyTile::kPanelBytes + row * core::kPanelRowBytes;
    *reinterpret_cast<uint4*>(s_row + i % kPieces * 16) = {};
  }
  fence_async_proxy();
  sync_named(kTailBarrier, 128 * C::kConsumers);
}

/// One item of a computing warpgroup.
template <typename C, bool kPlain>
__device__ __forceinline__ void attend(SharedStorage<C>& s, const Params& params, const Item& item,
                                       RingPlace<C::kStages>& k_place,
                                       RingPlace<C::kStages>& v_place, std::uint32_t q_parity) {
  const AttentionParams& p = params.call;
  const Thread<C> t;
  const float factor = kPlain ? score_factor(p) : 1.f;
  Outputs<C> o;
  RowStates states;
  states.of[0] = states.of[1] = {core::negative_infinity<float>(), 0.f};
  if (item.tiles > 0) {
    const int first_query = item.first_row + 64 * t.group;
    const KeyRange all =
        core::keys_seen_by_all(item.sequence.mask, first_query,
                               max(min(first_query + 64, item.first_row + item.rows), 1) - 1);
    Scores<C> score;
    std::uint32_t a[C::kTileK / 16][4];
    float rescale[2];
    int tile = item.first_tile + item.tiles - 1;

    wait(s.q_full, q_parity);
    wait(s.k_full[k_place.stage], k_place.parity);
    fence_products();
    begin_scores<C>(score, s, t.group, k_place.stage);
    wait_products<0>();
    pin(score);
    arrive_once_per_warp(s.k_empty[k_place.stage], t.lane);
    k_place.next();
    if (params.garbage_tail && (tile + 1) * C::kTileK > item.sequence.kv_len) {
      wait(s.v_full[v_place.stage], v_place.parity);
      clear_tail<C>(s, v_place.stage, item.sequence.kv_len - tile * C::kTileK);
    }
    finish_scores<C, kPlain>(score, t, p, item, all, tile * C::kTileK);
    softmax<C>(score, states, rescale, factor, p.plant);
    pack_probabilities<C>(a, score);

    bool adds = false;
#pragma unroll 1
    for (--tile; tile >= item.first_tile; --tile) {
      wait(s.k_full[k_place.stage], k_place.parity);
      if (C::kTurns) sync_named(kTurnBarrier + t.group, 256);
      fence_products();
      begin_scores<C>(score, s, t.group, k_place.stage);
      wait(s.v_full[v_place.stage], v_place.parity);
      fence_products();
      begin_output<C>(o, a, s, v_place.stage, adds);
      if (C::kTurns) arrive_named(kTurnBarrier + (t.group + 1) % C::kConsumers, 256);
      wait_products<1>();
      pin(score);
      arrive_once_per_warp(s.k_empty[k_place.stage], t.lane);
      k_place.next();
      finish_scores<C, kPlain>(score, t, p, item, all, tile * C::kTileK);
      softmax<C>(score, states, rescale, factor, p.plant);
      wait_products<0>();
      pin(o);
      arrive_once_per_warp(s.v_empty[v_place.stage], t.lane);
      v_place.next();
      rescale_output<C>(o, rescale);
      pack_probabilities<C>(a, score);
      adds = true;
    }
    arrive_once_per_warp(s.q_empty, t.lane);
    wait(s.v_full[v_place.stage], v_place.parity);
    fence_products();
    begin_output<C>(o, a, s, v_place.stage, adds);
    wait_products<0>();
    pin(o);
    arrive_once_per_warp(s.v_empty[v_place.stage], t.lane);
    v_place.next();
  } else {
#pragma unroll
    for (float& x : o) x = 0.f;
  }
  write_results<C>(o, states, p, item, t, factor);
}

/// All items of the block.
template <typename C, bool kPlain>
__device__ __forceinline__ void compute(SharedStorage<C>& s, const Params& params) {
  const Thread<C> t;
  RingPlace<C::kStages> k_place, v_place;
  RingPlace<2> item_place;
  std::uint32_t q_parity = 0;
  // The first warpgroup has the first turn.
  if (C::kTurns && t.group == C::kConsumers - 1) arrive_named(kTurnBarrier, 256);
  for (;;) {
    wait(s.item_full[item_place.stage], item_place.parity);
    const Item& item = s.items[item_place.stage];
    if (item.rows < 0) return;
    attend<C, kPlain>(s, params, item, k_place, v_place, q_parity);
    if (item.tiles > 0) q_parity ^= 1;
    arrive_once_per_warp(s.item_empty[item_place.stage], t.lane);
    item_place.next();
  }
}

template <typename C>
__device__ __forceinline__ void init_barriers(SharedStorage<C>& s) {
  constexpr int kWarps = 4 * C::kConsumers;
  init_barrier(s.q_full, 1);
  init_barrier(s.q_empty, kWarps);
  for (int i = 0; i < C::kStages; ++i) {
    init_barrier(s.k_full[i], 1);
    init_barrier(s.v_full[i], 1);
    init_barrier(s.k_empty[i], kWarps);
    init_barrier(s.v_empty[i], kWarps);
  }
  for (int i = 0; i < 2; ++i) {
    init_barrier(s.item_full[i], 1);
    init_barrier(s.item_empty[i], kWarps);
  }
  fence_barrier_init();
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  SharedStorage<C>& s = *reinterpret_cast<SharedStorage<C>*>(s_bytes);
  let_next_kernel_start();
  if (threadIdx.x == 0) init_barriers<C>(s);
  __syncthreads();
  if (threadIdx.x < 128) {
    shrink_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) load<C>(s, params);
  } else {
    grow_registers<C::kConsumerRegisters>();
    if (params.plain) {
      compute<C, true>(s, params);
    } else {
      compute<C, false>(s, params);
    }
  }
}

}  // namespace flashcore::cuda::sm90
