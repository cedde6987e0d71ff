// Synchronisation of the roles of a fused kernel for gradients (core/sm90_bwd_roles.h has those of
// the split form).
//
//   producer   one thread: fills A, and the steps B by TMA
//   tail       one warp: statistics of the query rows; zeros in B past a sequence's last row
//   consumer   two warpgroups, 64 keys each: mainloop and epilogue of dK and dV
//   store      one thread: adds dQ tiles to memory, each in its turn
//
// A work tile is 128 keys of a KV head. Its steps go down through the query tiles, and for each
// through the query heads of the group. Both warpgroups compute every step. dZ of a step goes to
// shared memory, so that each of them can compute half the columns of dQ.
#pragma once

#include "core/sm90_bwd_roles.h"
#include "core/sm90_fused_pipeline.h"

namespace flashcore::core {

FLASHCORE_HD BwdStep first_fused_step(const BwdSteps& work) {
  return {work.first_tile + work.tiles - 1, 0};
}
FLASHCORE_HD void advance_down(BwdStep& step, std::int32_t heads) {
  if (++step.head == heads) {
    step.head = 0;
    --step.tile;
  }
}

template <typename Warp>
FLASHCORE_ROLE void produce_fused(Warp& warp) {
  using B = Sm90BwdBarrier;
  using Steps = FusedSteps;
  BwdQueueState queue;
  BwdTileState a;
  FusedSteps::State b;
  for (; next_bwd_tile<Steps>(warp, queue); queue.advance()) {
    const std::int32_t heads = warp.work(queue).heads;
    const std::int32_t steps = warp.work(queue).steps();
    BwdStep step = first_fused_step(warp.work(queue));
    if (steps <= kBwdStepsAhead) warp.template arrive<B::tile_requested>(PipelineState<1>{});
    FLASHCORE_LOOP
    for (std::int32_t i = 0; i < steps; ++i, advance_down(step, heads), b.advance()) {
      if (i > 0 && i + kBwdStepsAhead == steps) {
        warp.template arrive<B::tile_requested>(PipelineState<1>{});
      }
      if (i == 0) {
        warp.template wait<B::a1_empty>(a);
        warp.template load_a1<Steps>(queue);
      }
      warp.template wait<B::q_empty>(b);
      warp.template load_b1<Steps>(queue, b, step);
      if (i == 0) {
        warp.template wait<B::a2_empty>(a);
        warp.template load_a2<Steps>(queue);
      }
      warp.template wait<B::dout_empty>(b);
      warp.template load_b2<Steps>(queue, b, step);
    }
    if (steps > 0) a.advance();
    warp.template arrive<B::tile_empty>(queue);
  }
}

template <typename Warp>
FLASHCORE_ROLE void prepare_fused(Warp& warp) {
  using B = Sm90BwdBarrier;
  using Steps = FusedSteps;
  BwdQueueState queue;
  FusedSteps::State b;
  for (; next_bwd_tile<Steps>(warp, queue); queue.advance()) {
    const std::int32_t heads = warp.work(queue).heads;
    const std::int32_t steps = warp.work(queue).steps();
    BwdStep step = first_fused_step(warp.work(queue));
    FLASHCORE_LOOP
    for (std::int32_t i = 0; i < steps; ++i, advance_down(step, heads), b.advance()) {
      warp.template read_rows<Steps>(queue, step);  // its latency passes during the wait
      warp.template wait<B::q_empty>(b);
      warp.template store_rows<Steps>(b);
      if (warp.template has_dirty_tail<Steps>(queue, step)) {
        warp.template wait<B::q_full>(b);
        warp.template wait<B::dout_full>(b);
        warp.template zero_tail<Steps>(queue, b, step);
      }
      warp.template arrive<B::rows_ready>(b);
    }
    warp.template arrive<B::tile_empty>(queue);
  }
}

template <typename Warp>
FLASHCORE_ROLE void store_fused(Warp& warp) {
  using B = Sm90BwdBarrier;
  using Steps = FusedSteps;
  BwdQueueState queue;
  FusedSteps::State b;
  for (; next_bwd_tile<Steps>(warp, queue); queue.advance()) {
    const std::int32_t heads = warp.work(queue).heads;
    const std::int32_t steps = warp.work(queue).steps();
    BwdStep step = first_fused_step(warp.work(queue));
    if (steps > 0) warp.look_at_turn(queue, step);
    FLASHCORE_LOOP
    for (std::int32_t i = 0; i < steps; ++i, b.advance()) {
      warp.wait_turn();
      warp.template wait<B::dq_full>(b);
      warp.add_dq(b);
      advance_down(step, heads);
      if (i + 1 < steps) warp.look_at_turn(queue, step);  // while memory adds
      warp.wait_read();
      warp.template arrive<B::dq_empty>(b);
      warp.pass_turn();
    }
    warp.template arrive<B::tile_empty>(queue);
  }
}

/// A warpgroup's position in a work tile. What can be read again is not here: registers are few.
struct FusedPosition {
  BwdQueueState queue;
  FusedSteps::State b;
  BwdStep step;

  FLASHCORE_HD bool is_last(const BwdSteps& work) const {
    return step.tile == work.first_tile && step.head + 1 == work.heads;
  }
};

template <typename Warp>
FLASHCORE_ROLE void issue_fused_s(Warp& warp, FusedSteps::State b) {
  warp.template wait<Sm90BwdBarrier::q_full>(b);
  warp.template wait<Sm90BwdBarrier::rows_ready>(b);
  warp.issue_s(b);
}
template <typename Warp>
FLASHCORE_ROLE void issue_fused_dp(Warp& warp, FusedSteps::State b) {
  warp.template wait<Sm90BwdBarrier::dout_full>(b);
  warp.issue_dp(b);
}

/// P and dZ of a step, whose dP is in flight.
template <typename Warp>
FLASHCORE_ROLE void consume_fused_pairs(Warp& warp, const FusedPosition& at) {
  const bool needs_mask = warp.needs_mask(at.queue, at.step.tile);
  warp.probabilities(at.queue, at.b, at.step, needs_mask);
  warp.template wgmma_wait<0>();
  if (at.is_last(warp.work(at.queue))) {
    warp.template arrive<Sm90BwdBarrier::a2_empty>(BwdTileState{});
  }
  warp.score_gradients(at.queue, at.b, at.step, needs_mask);
}

/// Issues dV and dK of a step, and shows dZ to the other warpgroup.
template <typename Warp>
FLASHCORE_ROLE void issue_fused_sums(Warp& warp, FusedSteps::State b) {
  using B = Sm90BwdBarrier;
  warp.issue_dv(b, true);
  warp.template wait<B::dz_empty>(b);
  warp.stage_dz(b);
  warp.template arrive<B::dz_full>(b);
  warp.issue_dx(b, true);
}

/// Issues dQ of a step after dV and dK, which have ended.
template <typename Warp>
FLASHCORE_ROLE void issue_fused_dq(Warp& warp, FusedSteps::State b) {
  using B = Sm90BwdBarrier;
  warp.template arrive<B::q_empty>(b);
  warp.template arrive<B::dout_empty>(b);
  warp.template wait<B::dz_full>(b);
  warp.issue_dq(b);
}
template <typename Warp>
FLASHCORE_ROLE void store_fused_dq(Warp& warp, FusedSteps::State b) {
  using B = Sm90BwdBarrier;
  warp.template arrive<B::dz_empty>(b);
  warp.template wait<B::dq_empty>(b);
  warp.stage_dq(b);
  warp.template arrive<B::dq_full>(b);
}

/// The steps of a work tile. The loop goes from dV of a step to dZ of the next one.
template <typename Warp>
FLASHCORE_ROLE void consume_fused_steps(Warp& warp, FusedPosition& at) {
  using B = Sm90BwdBarrier;
  warp.template wait<B::a1_full>(warp.tile_state(at.queue));
  issue_fused_s(warp, at.b);
  warp.template wait<B::a2_full>(warp.tile_state(at.queue));
  issue_fused_dp(warp, at.b);
  warp.inspect_keys(at.queue);  // while S and dP are computed
  warp.template wgmma_wait<1>();
  consume_fused_pairs(warp, at);
  for (;;) {
    issue_fused_sums(warp, at.b);
    if (at.is_last(warp.work(at.queue))) break;
    const FusedSteps::State used = warp.uniform(at.b);
    at.b = used;
    at.b.advance();
    advance_down(at.step, warp.work(at.queue).heads);
    issue_fused_s(warp, at.b);
    warp.template wgmma_wait<1>();
    issue_fused_dq(warp, used);
    warp.template wgmma_wait<0>();
    store_fused_dq(warp, used);
    issue_fused_dp(warp, at.b);
    consume_fused_pairs(warp, at);
  }
  warp.template wgmma_wait<0>();
  issue_fused_dq(warp, at.b);
  warp.template wgmma_wait<0>();
  warp.template arrive<B::a1_empty>(BwdTileState{});
  store_fused_dq(warp, at.b);
  at.b.advance();
}

template <typename Warp>
FLASHCORE_ROLE void consume_fused(Warp& warp) {
  using Steps = FusedSteps;
  BwdQueueState queue;
  FusedSteps::State b;
  for (; next_bwd_tile<Steps>(warp, queue); queue.advance()) {
    warp.begin_tile(queue);
    if (warp.work(queue).tiles > 0) {
      FusedPosition at{queue, b, first_fused_step(warp.work(queue))};
      consume_fused_steps(warp, at);
      b = at.b;
    }
    warp.store_tile(queue);
    warp.template arrive<Sm90BwdBarrier::tile_empty>(queue);
  }
}

}  // namespace flashcore::core
