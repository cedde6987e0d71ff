// Attention forward on Hopper's tensor cores (wgmma, sm_90a): softmax(Q K^T) V in one kernel, for
// many query rows.
//
//   grid     one block per SM, each working through its items: tile_q query rows of one head, or of
//            some that share K and V
//   block    one warpgroup deals out work and loads (a thread each; by TMA), the others compute, 64
//            rows each, with the first one's registers
//   steps    tile_k keys at a time through rings of kStages K and V tiles
//   overlap  the products of a step are issued before the softmax of the step before is needed:
//            S' = Q K'^T and O += P V run while the warpgroups, in turns, do their exponentials
//   codes    e4m3 inputs have a simpler step (codes.cuh) and values to transpose (transpose.cuh)
//   scores   stay in registers: S is the accumulator of Q K^T and, packed to 16 bits, the A operand
//            of P V
//   barriers, shared memory: config.cuh
#pragma once

#include <cuda_runtime.h>

#include "cuda/primitives/hopper.cuh"
#include "cuda/primitives/wgmma.cuh"
#include "cuda/sm90/codes.cuh"
#include "cuda/sm90/config.cuh"
#include "cuda/sm90/load.cuh"
#include "cuda/sm90/parts.cuh"
#include "cuda/sm90/products.cuh"
#include "cuda/sm90/results.cuh"
#include "cuda/sm90/scores.cuh"
#include "cuda/sm90/softmax.cuh"
#include "cuda/sm90/transpose.cuh"

namespace flashcore::cuda::sm90 {

/// O += P V, or = P V, begun.
template <typename C>
__device__ __forceinline__ void begin_output(Outputs<C>& o,
                                             const std::uint32_t (&a)[C::kTileK / 16][4],
                                             SharedStorage<C>& s, int stage, bool adds) {
  using V = typename C::KeyTile;
  const std::uint64_t v = core::matrix_descriptor(shared_address(s.v[stage]), V::kPanelBytes);
#pragma unroll
  for (int step = 0; step < C::kTileK / 16; ++step) {
    Wgmma<C::kHeadDim>::template across_rows<typename C::Element>(
        o, a[step], core::advance(v, V::across_rows(step)), adds || step > 0);
  }
  commit_products();
}

/// Zeros in place of what lies behind the last key: its weights are 0, but 0 · NaN is NaN. Every
/// warpgroup does it for itself: not all of them may need the tile.
template <typename C>
__device__ __forceinline__ void clear_tail(SharedStorage<C>& s, const Item& item, std::int32_t tile,
                                           RingPlace<C::kStages> place) {
  constexpr int kPieces = core::kPanelRowBytes / 16;
  const int keys = item.sequence.kv_len - tile * C::kTileK;
  if (keys >= C::kTileK) return;
  wait(s.v_full[place.stage()], place.parity());
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < C::kTileK * kPieces; i += 128) {
    if (i / kPieces < keys) continue;
#pragma unroll 1
    for (int panel = 0; panel < C::KeyTile::kPanels; ++panel) {
      unsigned char* s_panel = s.v[place.stage()] + panel * C::KeyTile::kPanelBytes;
      *reinterpret_cast<uint4*>(s_panel + i * 16) = {};
    }
  }
  fence_async_proxy();
  sync_named(kTailBarrier + threadIdx.x / 128, 128);
}

template <typename C>
__device__ __forceinline__ void finish_item(Outputs<C>& o, SharedStorage<C>& s,
                                            const Params& params, const Item& item,
                                            const Thread<C>& t) {
  if constexpr (C::kSpread) {
    if (item.part >= 0 && !join_parts<C>(o, s, params, item, t)) return;
  }
  write_results<C>(o, s, params.call, item, t);
}

/// All items of the block, as one stream of steps.
template <typename C, bool kPlain>
__device__ __forceinline__ void compute(SharedStorage<C>& s, const Params& params) {
  if constexpr (C::kCodes) return compute_codes<C, kPlain>(s, params);
  const AttentionParams& p = params.call;
  const Thread<C> t(threadIdx.x, params.heads);
  const float factor = kPlain ? score_factor(p) : 1.f;
  Scores<C> score;
  Outputs<C> o;
  std::uint32_t a[C::kTileK / 16][4];
  RowStates states = fresh_states();
  float rescale[2];
  Step<C> at{};

  const auto weigh = [&](bool cut) {  // what follows Q K^T in every step
    pin(score);
    arrive_once_per_warp(s.k_empty[at.place.stage()], t.lane);
    if (at.left == 1) arrive_once_per_warp(s.q_empty[at.queries(t).barrier()], t.lane);
    finish_scores<C, kPlain>(score, t, p, s.items[at.item.stage()], at.tile, cut,
                             [&](int) { return score_factor(p); });
    softmax<C>(score, states, rescale, factor, p.plant);
  };

  if (C::kForm.turns && t.group == C::kConsumers - 1) arrive_named(kTurnBarrier, 256);
  if (!enter_item<C>(at, s, t)) return;
  wait(s.k_full[at.place.stage()], at.place.parity());
  fence_products();
  begin_scores<C>(score, s, at.queries(t).place(), at.place.stage());
  wait_products<0>();
  weigh(at.cut(s, t));
  pack_probabilities<C>(a, score);

  // `at` is the step whose scores are there; its output is begun beside the next one's scores.
  bool adds = false;                                   // to what the item has already
  bool next_keys_there = false, values_there = false;  // known without waiting
  for (;;) {
    const RingPlace<C::kStages> values = at.place;
    const RingPlace<kItems> item = at.item;
    if (params.garbage_tail) clear_tail<C>(s, s.items[item.stage()], at.tile, values);
    const bool ends = at.left == 1;
    bool passes = false;
    at.place.next();
    if (!ends) {
      ++at.tile;
      --at.left;
    } else {
      passes = s.items[item.stage()].passes[t.group];
      if (passes) {
        pass_keys<C>(s, at.place, t);
        at.place.next();
        next_keys_there = false;
      }
      at.item.next();
      if (!enter_item<C>(at, s, t)) {
        wait(s.v_full[values.stage()], values.parity());
        fence_products();
        begin_output<C>(o, a, s, values.stage(), adds);
        leave_states<C>(s, states, t, factor);
        wait_products<0>();
        pin(o);
        finish_item<C>(o, s, params, s.items[item.stage()], t);
        return;
      }
    }
    if (!next_keys_there) wait(s.k_full[at.place.stage()], at.place.parity());
    if (C::kForm.turns) sync_named(kTurnBarrier + t.group, 256);
    fence_products();
    begin_scores<C>(score, s, at.queries(t).place(), at.place.stage());
    if (!values_there) wait(s.v_full[values.stage()], values.parity());
    fence_products();
    begin_output<C>(o, a, s, values.stage(), adds);
    if (C::kForm.turns) arrive_named(kTurnBarrier + (t.group + 1) % C::kConsumers, 256);
    if (ends) {
      leave_states<C>(s, states, t, factor);
      states = fresh_states();
    }
    const auto ask_for_values = [&] {
      values_there = is_complete(s.v_full[at.place.stage()], at.place.parity());
    };
    const bool cut = at.cut(s, t);
    if (C::kForm.asks_early) ask_for_values();
    wait_products<1>();
    weigh(cut);
    const RingPlace<C::kStages> next{at.place.steps + 1};
    next_keys_there = is_complete(s.k_full[next.stage()], next.parity());
    if (!C::kForm.asks_early) ask_for_values();
    const bool rescales = rescales_any(rescale);
    hold_back_waits(params.order.items < 0);
    wait_products<0>();
    pin(o);
    arrive_once_per_warp(s.v_empty[values.stage()], t.lane);
    if (passes) pass_values<C>(s, {values.steps + 1}, t);
    pack_probabilities<C>(a, score);
    if (ends) {
      finish_item<C>(o, s, params, s.items[item.stage()], t);
      arrive_once_per_warp(s.item_empty[item.stage()], t.lane);
    } else if (rescales) {
      rescale_output<C>(o, rescale);
    }
    adds = !ends;
  }
}

template <typename C>
__device__ __forceinline__ void init_barriers(SharedStorage<C>& s) {
  constexpr int kWarps = 4 * C::kConsumers;
  for (int i = 0; i < QueryPlace<C>::kBarriers; ++i) {
    init_barrier(s.q_full[i], 1);
    init_barrier(s.q_empty[i], 4 * C::kQueriesTogether);
  }
  for (int i = 0; i < C::kStages; ++i) {
    init_barrier(s.k_full[i], 1);
    init_barrier(s.v_full[i], C::kCodes ? C::kTransposers : 1);
    init_barrier(s.k_empty[i], kWarps);
    init_barrier(s.v_empty[i], kWarps);
  }
  for (int i = 0; i < kItems; ++i) {
    init_barrier(s.item_full[i], 1);
    init_barrier(s.item_empty[i], kWarps + 1 + C::kTransposers);  // and the loader
  }
  if constexpr (C::kCodes) {
    for (int i = 0; i < C::kRawStages; ++i) {
      init_barrier(s.raw_full[i], 1);
      init_barrier(s.raw_empty[i], C::kTransposers);
    }
  }
  init_barrier(s.item_wanted, 1);
  fence_barrier_init();
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1) attention(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  SharedStorage<C>& s = *reinterpret_cast<SharedStorage<C>*>(s_bytes);
  let_next_kernel_start();
  if (threadIdx.x == 0) init_barriers<C>(s);
  __syncthreads();
  if (threadIdx.x < 128) {
    shrink_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) load<C>(s, params);
    if (threadIdx.x == 32) deal<C>(s, params);
    if constexpr (C::kCodes) {
      if (threadIdx.x >= 64) {
        transpose_values<C>(s, params.call, same_in_warp(threadIdx.x / 32) - 2, threadIdx.x % 32);
      }
    }
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
