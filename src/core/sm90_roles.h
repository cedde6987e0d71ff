// What the warps of a Hopper CTA do, as far as they wait for each other. A role is a template over
// the warp that plays it: the kernel's (cuda/sm90), which copies and multiplies, or the model's
// (tests/protocol), which checks every access. Both run these very lines.
//
//   scheduler   one thread: fetches items and describes them in the item queue
//   producer    one thread: fills the rings of Q, K and V tiles
//   transposer  two warps, for 8-bit values: from the raw ring to the ring of V
//   consumer    warpgroups of four warps: Q K^T, softmax, P V, output
//
// Every warp has wait<barrier>(place), test_wait<barrier>(place), arrive<barrier>(place),
// item(place) and has_fault(bug). Products run from their issue until wgmma_wait<n>() leaves at
// most n groups of them under way.
#pragma once

#include "core/fault.h"
#include "core/sm90_work_tile.h"

namespace flashcore::core {

/// The scheduler fetches an item when this many tiles of the one before are still to be loaded:
/// that hides the latency of the atomic, and a CTA with long items does not hoard others.
inline constexpr int kTilesAhead = 2;

/// What a barrier's mbarriers are initialised with.
FLASHCORE_HD constexpr int initial_arrivals(const Sm90Traits& shape, Sm90Barrier barrier,
                                            bool too_few) {
  const int arrivals = sm90_barrier(shape, barrier).arrivals;
  return too_few && barrier == Sm90Barrier::k_empty ? arrivals - 1 : arrivals;
}

template <typename Warp>
FLASHCORE_ROLE void schedule_tiles(Warp& warp) {
  TileQueueState place;
  std::int32_t index = warp.first_piece();
  while (index < warp.pieces()) {
    warp.template wait<Sm90Barrier::tile_empty>(place);
    if (warp.describe(place, index)) {
      warp.template arrive<Sm90Barrier::tile_full>(place);
      warp.template wait<Sm90Barrier::tile_requested>(PipelineState<1>{place.steps});
      place.next();
    }
    index = warp.next_piece();
  }
  warp.template wait<Sm90Barrier::tile_empty>(place);
  warp.mark_end(place);
  warp.template arrive<Sm90Barrier::tile_full>(place);
}

template <typename Warp>
FLASHCORE_ROLE void produce(Warp& warp) {
  using P = typename Warp::Pipeline;
  typename P::KvState k_place;
  typename P::LoadedVState v_place;
  for (TileQueueState place;; place.next()) {
    warp.template wait<Sm90Barrier::tile_full>(place);
    const TileSteps& item = warp.item(place);
    if (item.queries < 0) return;
    const auto load_keys = [&](std::int32_t tile) {
      warp.template wait<Sm90Barrier::k_empty>(k_place);
      warp.copy_keys(place, k_place, tile);
      k_place.next();
    };
    const auto load_queries = [&](int group, int end_group) {
      FLASHCORE_LOOP
      for (; group < end_group; group += P::kQTilesPerBarrier) {
        const typename P::QStage queries{place.steps, group};
        warp.template wait<Sm90Barrier::q_empty>(queries.emptied());
        warp.copy_queries(place, queries, group);
      }
    };
    const std::int32_t end_tile = item.first_tile + item.tiles;
    // First what finds its room free first: queries that need not wait for those of the item before
    // this one, then the first keys.
    constexpr int kFree = P::kQStages - P::kConsumers;
    load_queries(0, kFree);
    load_keys(item.first_tile);
    load_queries(kFree, P::kConsumers);
    // In the order in which they are needed: the scores of a step are begun before the step before
    // it meets its values.
    if (item.tiles <= kTilesAhead)
      warp.template arrive<Sm90Barrier::tile_requested>(PipelineState<1>{});
    for (std::int32_t tile = item.first_tile; tile < end_tile; ++tile) {
      if (tile + 1 + kTilesAhead == end_tile) {
        warp.template arrive<Sm90Barrier::tile_requested>(PipelineState<1>{});
      }
      if (tile + 1 < end_tile) load_keys(tile + 1);
      warp.template wait<P::kLoadedEmpty>(v_place);
      warp.copy_values(place, v_place, tile);
      v_place.next();
    }
    warp.template arrive<Sm90Barrier::tile_empty>(place);
  }
}

template <typename Warp>
FLASHCORE_ROLE void transpose_values(Warp& warp) {
  using P = typename Warp::Pipeline;
  typename P::KvState done;
  for (TileQueueState place;; place.next()) {
    warp.template wait<Sm90Barrier::tile_full>(place);
    if (warp.item(place).queries < 0) return;
    FLASHCORE_LOOP
    for (std::int32_t i = 0; i < warp.item(place).tiles; ++i, done.next()) {
      const typename P::LoadedVState raw{done.steps};
      warp.template wait<Sm90Barrier::v_staging_full>(raw);
      warp.template wait<Sm90Barrier::v_empty>(done);
      warp.transpose(raw, done, place, warp.item(place).first_tile + i);
      warp.template arrive<Sm90Barrier::v_staging_empty>(raw);
      warp.template arrive<Sm90Barrier::v_full>(done);
    }
    warp.template arrive<Sm90Barrier::tile_empty>(place);
  }
}

/// The same slot, one use too early.
struct RoundBefore {
  std::uint32_t slot, next_round;
  FLASHCORE_HD std::uint32_t stage() const { return slot; }
  FLASHCORE_HD std::uint32_t round() const { return next_round - 1; }
};

/// Where a consumer is in the stream of steps: items follow each other without a pause.
template <typename P>
struct KvTileIterator {
  typename P::KvState kv;
  TileQueueState item;
  std::int32_t tile;
  std::int32_t left;  // steps of the warpgroup in the item, with this one

  FLASHCORE_HD typename P::QStage queries(int group) const { return {item.steps, group}; }
};

/// Waits for item `at.item`; false: there is none.
template <typename Warp>
FLASHCORE_ROLE bool next_work_tile(Warp& warp, KvTileIterator<typename Warp::Pipeline>& at) {
  warp.template wait<Sm90Barrier::tile_full>(at.item);
  const TileSteps& item = warp.item(at.item);
  if (item.queries < 0) return false;
  const typename Warp::Pipeline::QStage queries = at.queries(warp.group());
  if (warp.has_fault(InjectedFault::parity_wrong)) {
    warp.template wait<Sm90Barrier::q_full>(RoundBefore{queries.stage(), queries.round()});
  } else {
    warp.template wait<Sm90Barrier::q_full>(queries);
  }
  at.left = item.kv_tiles[warp.group()];
  at.tile = item.first_tile;
  return true;
}

/// Gives a tile back unused that only later rows see, and passes on the turn at the tensor cores.
template <typename Warp, typename Place>
FLASHCORE_ROLE void release_k(Warp& warp, const Place& place) {
  warp.template wait<Sm90Barrier::k_full>(place);
  if (!warp.has_fault(InjectedFault::arrival_missing)) {
    warp.template arrive<Sm90Barrier::k_empty>(place);
  }
  if (Warp::kPingPong && !warp.has_fault(InjectedFault::turn_skipped)) {
    warp.ping_pong_wait();
    warp.ping_pong_arrive();
  }
}

template <typename Warp, typename Place>
FLASHCORE_ROLE void release_v(Warp& warp, const Place& place) {
  warp.template wait<Sm90Barrier::v_full>(place);
  warp.template arrive<Sm90Barrier::v_empty>(place);
}

/// Q K^T of the step is there: gives K back, and Q where it was the item's last, and turns scores
/// into probabilities.
template <typename Warp>
FLASHCORE_ROLE void retire_qk(Warp& warp, const KvTileIterator<typename Warp::Pipeline>& at,
                              bool needs_mask) {
  warp.fence_acc_s();
  warp.template arrive<Sm90Barrier::k_empty>(at.kv);
  if (at.left == 1) warp.template arrive<Sm90Barrier::q_empty>(at.queries(warp.group()));
  warp.softmax(at, needs_mask);
}

/// A consumer warp of 16-bit tensors: all items of the CTA as one stream of steps. S' = Q K'^T of a
/// step and O += P V of the step before run side by side.
template <typename Warp>
FLASHCORE_ROLE void consume(Warp& warp) {
  using P = typename Warp::Pipeline;
  KvTileIterator<P> at{};
  if (Warp::kPingPong && warp.group() == P::kConsumers - 1) warp.ping_pong_arrive();
  if (!next_work_tile(warp, at)) return;
  warp.template wait<Sm90Barrier::k_full>(at.kv);
  warp.issue_qk(at.queries(warp.group()), at.kv, at);
  warp.template wgmma_wait<0>();
  retire_qk(warp, at, warp.needs_mask(at));
  warp.pack_probabilities();

  // `at` is the step whose scores are there; its P V is issued beside the next one's Q K^T.
  bool accumulates = false;                            // onto what the item has already
  bool next_keys_there = false, values_there = false;  // known without waiting
  for (;;) {
    const typename P::KvState values = at.kv;
    const TileQueueState item = at.item;
    if (warp.v_tail_dirty()) {
      if (warp.has_tail(item, at.tile)) {
        warp.template wait<Sm90Barrier::v_full>(values);
        warp.zero_v_tail(item, at.tile, values);
      }
    }
    const bool ends = at.left == 1;
    bool skips_last_tile = false;
    at.kv.next();
    if (!ends) {
      ++at.tile;
      --at.left;
    } else {
      skips_last_tile = warp.item(item).skips_last_tile[warp.group()];
      if (skips_last_tile) {
        release_k(warp, at.kv);
        at.kv.next();
        next_keys_there = false;
      }
      at.item.next();
      if (!next_work_tile(warp, at)) {
        warp.template wait<Sm90Barrier::v_full>(values);
        warp.issue_pv(values, accumulates);
        warp.stash_row_stats();
        warp.template wgmma_wait<0>();
        warp.fence_acc_o();
        warp.write_item(item);
        return;
      }
    }
    if (!next_keys_there) warp.template wait<Sm90Barrier::k_full>(at.kv);
    if (Warp::kPingPong) warp.ping_pong_wait();
    warp.issue_qk(at.queries(warp.group()), at.kv, at);
    if (!values_there) warp.template wait<Sm90Barrier::v_full>(values);
    warp.issue_pv(values, accumulates);
    if (Warp::kPingPong) warp.ping_pong_arrive();
    if (ends) {
      warp.stash_row_stats();
      warp.reset_row_stats();
    }
    const auto ask_for_values = [&] {
      values_there = warp.template test_wait<Sm90Barrier::v_full>(at.kv);
    };
    const bool needs_mask = warp.needs_mask(at);
    if (Warp::kProbesVEarly) ask_for_values();
    warp.template wgmma_wait<1>();
    retire_qk(warp, at, needs_mask);
    next_keys_there =
        warp.template test_wait<Sm90Barrier::k_full>(typename P::KvState{at.kv.steps + 1});
    if (!Warp::kProbesVEarly) ask_for_values();
    const bool rescales = warp.rescales_any();
    warp.keep_wait_below();
    warp.template wgmma_wait<0>();
    warp.fence_acc_o();
    warp.template arrive<Sm90Barrier::v_empty>(values);
    if (ends && warp.has_fault(InjectedFault::stage_released_twice)) {
      warp.template arrive<Sm90Barrier::v_empty>(values);
    }
    if (skips_last_tile) release_v(warp, typename P::KvState{values.steps + 1});
    warp.pack_probabilities();
    if (ends) {
      warp.write_item(item);
      warp.template arrive<Sm90Barrier::tile_empty>(item);
    } else if (rescales) {
      warp.rescale_output();
    }
    accumulates = !ends;
  }
}

/// A consumer warp of e4m3 tensors. Its steps follow one after the other: what one warpgroup waits
/// for, the others fill. kScoresAhead: Q K^T of the next step is issued at the end of this one.
template <typename Warp>
FLASHCORE_ROLE void consume_fp8(Warp& warp) {
  using P = typename Warp::Pipeline;
  for (KvTileIterator<P> at{}; next_work_tile(warp, at); at.item.next()) {
    warp.begin_item(at.item);
    const auto begin_step = [&] {
      warp.template wait<Sm90Barrier::k_full>(at.kv);
      warp.issue_qk(at.queries(warp.group()), at.kv, at);
    };
    const auto finish_step = [&] {
      const typename P::KvState place = at.kv;
      const bool needs_mask = warp.needs_mask(at);
      warp.template wgmma_wait<0>();
      retire_qk(warp, at, needs_mask);
      warp.pack_probabilities();
      warp.template wait<Sm90Barrier::v_full>(place);
      warp.add_pv(place, at.tile);
      warp.template arrive<Sm90Barrier::v_empty>(place);
      if (at.left == 1 && warp.has_fault(InjectedFault::stage_released_twice)) {
        warp.template arrive<Sm90Barrier::v_empty>(place);
      }
    };
    if constexpr (Warp::kScoresAhead) {
      begin_step();
      FLASHCORE_LOOP
      for (;;) {
        finish_step();
        at.kv.next();
        if (at.left == 1) break;
        --at.left;
        ++at.tile;
        begin_step();
      }
    } else {
      FLASHCORE_LOOP
      for (; at.left > 0; --at.left, ++at.tile, at.kv.next()) {
        begin_step();
        finish_step();
      }
    }
    if (warp.item(at.item).skips_last_tile[warp.group()]) {
      release_k(warp, at.kv);
      release_v(warp, at.kv);
      at.kv.next();
    }
    warp.stash_row_stats();
    warp.write_item(at.item);
    warp.template arrive<Sm90Barrier::tile_empty>(at.item);
  }
}

}  // namespace flashcore::core
