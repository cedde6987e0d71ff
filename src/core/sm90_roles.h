// Synchronisation of the roles of a Hopper CTA: scheduler, producer, transposer and consumer. A
// role is a template over the type of the warp that runs it: the kernel's warp (cuda/sm90) loads
// and multiplies, the model's (tests/protocol) checks every access. Both run the same code.
//
//   scheduler   one thread: fetches work tiles and writes them to the tile queue
//   producer    one warp, or several that share each K and V tile (pages): fills the pipelines.
//               The first of them leads: it also loads Q, and asks the scheduler for tiles
//   transposer  two warps (fp8): V from the staging buffer to the V pipeline
//   consumer    warpgroups of four warps: mainloop and epilogue
//
// Every warp has wait<barrier>(state), test_wait<barrier>(state), arrive<barrier>(state),
// work(state), the work tile in a slot of the queue, and has_fault(fault). A GEMM runs
// asynchronously from its issue until wgmma_wait<n>() leaves at most n groups in flight.
#pragma once

#include "core/fault.h"
#include "core/sm90_work_tile.h"

namespace flashcore::core {

/// The scheduler fetches the next tile this many KV tiles before the current one is loaded. That
/// hides the latency of the atomic and keeps CTAs from hoarding tiles.
inline constexpr int kTilesAhead = 2;

/// Arrival count of a barrier's mbarriers.
FLASHCORE_HD constexpr int initial_arrivals(const Sm90Traits& shape, Sm90Barrier barrier,
                                            int producers, bool too_few) {
  const int arrivals = sm90_barrier(shape, barrier, producers).arrivals;
  return too_few && barrier == Sm90Barrier::k_empty ? arrivals - 1 : arrivals;
}

/// Also of the kernels for gradients (core/sm90_bwd_roles.h).
template <typename Warp>
FLASHCORE_ROLE void schedule_tiles(Warp& warp) {
  using B = typename Warp::Barrier;
  typename Warp::Queue queue;
  std::int32_t index = warp.first_index();
  while (index < warp.num_scheduled()) {
    warp.template wait<B::tile_empty>(queue);
    if (warp.decode_work_tile(queue, index)) {
      warp.template arrive<B::tile_full>(queue);
      warp.template wait<B::tile_requested>(PipelineState<1>{queue.count});
      queue.advance();
    }
    index = warp.fetch_tile();
  }
  warp.template wait<B::tile_empty>(queue);
  warp.mark_end(queue);
  warp.template arrive<B::tile_full>(queue);
}

/// Waits for a free slot of the K or V pipeline. A producer that defers its arrivals makes them up
/// before it blocks: the consumers may need that tile to free the slot.
template <Sm90Barrier kEmpty, typename Warp, typename State>
FLASHCORE_ROLE void wait_to_load(Warp& warp, const State& state) {
  if constexpr (Warp::kDefersArrivals) {
    if (warp.template test_wait<kEmpty>(state)) return;
    warp.finish_loads();
  }
  warp.template wait<kEmpty>(state);
}

template <typename Warp>
FLASHCORE_ROLE void produce(Warp& warp) {
  using P = typename Warp::Pipeline;
  typename P::KvState k_state;
  typename P::LoadedVState v_state;
  for (TileQueueState queue;; queue.advance()) {
    if constexpr (Warp::kDefersArrivals) warp.finish_loads();
    warp.template wait<Sm90Barrier::tile_full>(queue);
    const TileSteps& work = warp.work(queue);
    if (work.queries < 0) return;
    const auto load_k = [&](std::int32_t tile) {
      wait_to_load<Sm90Barrier::k_empty>(warp, k_state);
      warp.load_k(queue, k_state, tile);
      k_state.advance();
    };
    const auto load_q = [&](int group, int end_group) {
      if (!warp.leads()) return;
      if constexpr (Warp::kDefersArrivals) warp.finish_loads();
      FLASHCORE_LOOP
      for (; group < end_group; group += P::kQTilesPerBarrier) {
        const typename P::QStage q_stage{queue.count, group};
        warp.template wait<Sm90Barrier::q_empty>(q_stage.emptied());
        warp.load_q(queue, q_stage, group);
      }
    };
    const auto request_tile = [&] {
      if (warp.leads()) warp.template arrive<Sm90Barrier::tile_requested>(PipelineState<1>{});
    };
    const std::int32_t end_tile = work.first_tile + work.tiles;
    // Slots that become free first are loaded first: those of Q tiles that need not wait for the
    // previous work tile, then that of the first K tile, then those of the other Q tiles.
    constexpr int kFreeQStages = P::kQStages - P::kConsumers;
    load_q(0, kFreeQStages);
    load_k(work.first_tile);
    load_q(kFreeQStages, P::kConsumers);
    // K and V tiles follow in the order of use: Q K^T of a step is issued before P V of the
    // previous step.
    if (work.tiles <= kTilesAhead) request_tile();
    for (std::int32_t tile = work.first_tile; tile < end_tile; ++tile) {
      if (tile + 1 + kTilesAhead == end_tile) request_tile();
      if (tile + 1 < end_tile) load_k(tile + 1);
      wait_to_load<P::kLoadedVEmpty>(warp, v_state);
      warp.load_v(queue, v_state, tile);
      v_state.advance();
    }
    warp.template arrive<Sm90Barrier::tile_empty>(queue);
  }
}

template <typename Warp>
FLASHCORE_ROLE void transpose_v(Warp& warp) {
  using P = typename Warp::Pipeline;
  typename P::KvState v_state;
  for (TileQueueState queue;; queue.advance()) {
    warp.template wait<Sm90Barrier::tile_full>(queue);
    if (warp.work(queue).queries < 0) return;
    FLASHCORE_LOOP
    for (std::int32_t i = 0; i < warp.work(queue).tiles; ++i, v_state.advance()) {
      const typename P::LoadedVState staging{v_state.count};
      warp.template wait<Sm90Barrier::v_staging_full>(staging);
      warp.template wait<Sm90Barrier::v_empty>(v_state);
      warp.transpose(staging, v_state, queue, warp.work(queue).first_tile + i);
      warp.template arrive<Sm90Barrier::v_staging_empty>(staging);
      warp.template arrive<Sm90Barrier::v_full>(v_state);
    }
    warp.template arrive<Sm90Barrier::tile_empty>(queue);
  }
}

/// The same slot one use too early: the fault parity_wrong.
struct RoundBefore {
  std::uint32_t slot, next_round;
  FLASHCORE_HD std::uint32_t stage() const { return slot; }
  FLASHCORE_HD std::uint32_t round() const { return next_round - 1; }
};

/// A consumer's position in the stream of steps, which runs through all work tiles of the CTA.
template <typename P>
struct KvTileIterator {
  typename P::KvState kv;
  TileQueueState queue;    // the work tile
  std::int32_t tile;       // KV tile
  std::int32_t remaining;  // steps of the warpgroup in this work tile, this one included

  FLASHCORE_HD typename P::QStage q_stage(int group) const { return {queue.count, group}; }
};

/// Waits for work tile `it.queue` and its Q; false at the end of the queue.
template <typename Warp>
FLASHCORE_ROLE bool next_work_tile(Warp& warp, KvTileIterator<typename Warp::Pipeline>& it) {
  warp.template wait<Sm90Barrier::tile_full>(it.queue);
  const TileSteps& work = warp.work(it.queue);
  if (work.queries < 0) return false;
  const typename Warp::Pipeline::QStage q_stage = it.q_stage(warp.group());
  if (warp.has_fault(InjectedFault::parity_wrong)) {
    warp.template wait<Sm90Barrier::q_full>(RoundBefore{q_stage.stage(), q_stage.round()});
  } else {
    warp.template wait<Sm90Barrier::q_full>(q_stage);
  }
  it.remaining = work.kv_tiles[warp.group()];
  it.tile = work.first_tile;
  return true;
}

/// Skips a K tile that only other warpgroups need: releases it and passes the ping-pong turn on.
template <typename Warp, typename State>
FLASHCORE_ROLE void release_k(Warp& warp, const State& state) {
  warp.template wait<Sm90Barrier::k_full>(state);
  if (!warp.has_fault(InjectedFault::arrival_missing)) {
    warp.template arrive<Sm90Barrier::k_empty>(state);
  }
  if (Warp::kPingPong && !warp.has_fault(InjectedFault::turn_skipped)) {
    warp.ping_pong_wait();
    warp.ping_pong_arrive();
  }
}

template <typename Warp, typename State>
FLASHCORE_ROLE void release_v(Warp& warp, const State& state) {
  warp.template wait<Sm90Barrier::v_full>(state);
  warp.template arrive<Sm90Barrier::v_empty>(state);
}

/// S is complete: releases K, and Q after the tile's last step; P = softmax(S).
template <typename Warp>
FLASHCORE_ROLE void softmax_step(Warp& warp, const KvTileIterator<typename Warp::Pipeline>& it,
                                 bool needs_mask) {
  warp.fence_acc_s();
  warp.template arrive<Sm90Barrier::k_empty>(it.kv);
  if (it.remaining == 1) warp.template arrive<Sm90Barrier::q_empty>(it.q_stage(warp.group()));
  warp.softmax(it, needs_mask);
}

/// Zero-fills the V rows past the last key of the step's tile if they may contain NaN.
template <typename Warp>
FLASHCORE_ROLE void clean_v_tail(Warp& warp, const KvTileIterator<typename Warp::Pipeline>& it) {
  if (warp.v_tail_dirty()) {
    if (warp.has_tail(it.queue, it.tile)) {
      warp.template wait<Sm90Barrier::v_full>(it.kv);
      warp.zero_v_tail(it.queue, it.tile, it.kv);
    }
  }
}

/// The last step of the last work tile: O += P V, epilogue.
template <typename Warp, typename State>
FLASHCORE_ROLE void finish_stream(Warp& warp, const State& v_state, TileQueueState queue,
                                  bool accumulates) {
  warp.template wait<Sm90Barrier::v_full>(v_state);
  warp.issue_pv(v_state, accumulates);
  warp.stash_row_stats(queue);
  warp.template wgmma_wait<0>();
  warp.fence_acc_o();
  warp.store_tile(queue);
}

/// 16-bit consumer. The work tiles of the CTA form one stream of steps: S' = Q K'^T of a step runs
/// beside O += P V of the previous step.
template <typename Warp>
FLASHCORE_ROLE void consume(Warp& warp) {
  using P = typename Warp::Pipeline;
  KvTileIterator<P> it{};
  if (Warp::kPingPong && warp.group() == P::kConsumers - 1) warp.ping_pong_arrive();
  if (!next_work_tile(warp, it)) return;
  // Prologue: S = Q K0^T, P = softmax(S).
  warp.template wait<Sm90Barrier::k_full>(it.kv);
  warp.issue_qk(it.q_stage(warp.group()), it.kv, it);
  warp.template wgmma_wait<0>();
  softmax_step(warp, it, warp.needs_mask(it));
  warp.pack_p();

  bool accumulates = false;                   // false: the tile's first P V overwrites O
  bool k_is_full = false, v_is_full = false;  // known by test_wait
  for (;;) {
    // P of step `it` is ready. Its P V is issued beside the next step's Q K^T.
    const typename P::KvState v_state = it.kv;
    const TileQueueState queue = it.queue;
    clean_v_tail(warp, it);
    const bool ends = it.remaining == 1;
    bool skips = false;
    it.kv.advance();
    if (!ends) {
      ++it.tile;
      --it.remaining;
    } else {
      skips = warp.work(queue).skips_last_tile[warp.group()];
      if (skips) {
        release_k(warp, it.kv);
        it.kv.advance();
        k_is_full = false;
      }
      it.queue.advance();
      if (!next_work_tile(warp, it)) return finish_stream(warp, v_state, queue, accumulates);
    }
    // S' = Q K'^T, O += P V.
    if (!k_is_full) warp.template wait<Sm90Barrier::k_full>(it.kv);
    if (Warp::kPingPong) warp.ping_pong_wait();
    warp.issue_qk(it.q_stage(warp.group()), it.kv, it);
    if (!v_is_full) warp.template wait<Sm90Barrier::v_full>(v_state);
    warp.issue_pv(v_state, accumulates);
    if (Warp::kPingPong) warp.ping_pong_arrive();
    if (ends) {
      warp.stash_row_stats(queue);
      warp.reset_row_stats();
    }
    // P' = softmax(S') while P V runs.
    const auto probe_v = [&] { v_is_full = warp.template test_wait<Sm90Barrier::v_full>(it.kv); };
    const bool needs_mask = warp.needs_mask(it);
    if (Warp::kProbesVEarly) probe_v();
    warp.template wgmma_wait<1>();
    softmax_step(warp, it, needs_mask);
    k_is_full = warp.template test_wait<Sm90Barrier::k_full>(typename P::KvState{it.kv.count + 1});
    if (!Warp::kProbesVEarly) probe_v();
    // O is complete: release V, rescale O or run the epilogue.
    const bool rescales = warp.rescales_any();
    warp.keep_wait_below();
    warp.template wgmma_wait<0>();
    warp.fence_acc_o();
    warp.template arrive<Sm90Barrier::v_empty>(v_state);
    if (ends && warp.has_fault(InjectedFault::stage_released_twice)) {
      warp.template arrive<Sm90Barrier::v_empty>(v_state);
    }
    if (skips) release_v(warp, typename P::KvState{v_state.count + 1});
    warp.pack_p();
    if (ends) {
      const TileQueueState done = Warp::kRecountsTile ? TileQueueState{it.queue.count - 1} : queue;
      warp.store_tile(done);
      warp.template arrive<Sm90Barrier::tile_empty>(done);
    } else if (rescales) {
      warp.rescale_o();
    }
    accumulates = !ends;
  }
}

/// fp8 consumer. A step runs in sequence; other warpgroups run while it waits. kQkAhead: the next
/// step's Q K^T is issued at the end of this one.
template <typename Warp>
FLASHCORE_ROLE void consume_fp8(Warp& warp) {
  using P = typename Warp::Pipeline;
  for (KvTileIterator<P> it{}; next_work_tile(warp, it); it.queue.advance()) {
    warp.begin_tile(it.queue);
    const auto issue_qk = [&] {
      warp.template wait<Sm90Barrier::k_full>(it.kv);
      warp.issue_qk(it.q_stage(warp.group()), it.kv, it);
    };
    const auto finish_step = [&] {
      const typename P::KvState v_state = it.kv;
      const bool needs_mask = warp.needs_mask(it);
      warp.template wgmma_wait<0>();
      softmax_step(warp, it, needs_mask);
      warp.pack_p();
      warp.template wait<Sm90Barrier::v_full>(v_state);
      warp.add_pv(v_state, it.tile);
      warp.template arrive<Sm90Barrier::v_empty>(v_state);
      if (it.remaining == 1 && warp.has_fault(InjectedFault::stage_released_twice)) {
        warp.template arrive<Sm90Barrier::v_empty>(v_state);
      }
    };
    if constexpr (Warp::kQkAhead) {
      issue_qk();
      FLASHCORE_LOOP
      for (;;) {
        finish_step();
        it.kv.advance();
        if (it.remaining == 1) break;
        --it.remaining;
        ++it.tile;
        issue_qk();
      }
    } else {
      FLASHCORE_LOOP
      for (; it.remaining > 0; --it.remaining, ++it.tile, it.kv.advance()) {
        issue_qk();
        finish_step();
      }
    }
    if (warp.work(it.queue).skips_last_tile[warp.group()]) {
      release_k(warp, it.kv);
      release_v(warp, it.kv);
      it.kv.advance();
    }
    warp.stash_row_stats(it.queue);
    warp.store_tile(it.queue);
    warp.template arrive<Sm90Barrier::tile_empty>(it.queue);
  }
}

}  // namespace flashcore::core
