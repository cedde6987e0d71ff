// Synchronisation of the roles of a Hopper CTA that computes gradients: scheduler
// (core::schedule_tiles), producer, tail warp and consumers. As in core/sm90_roles.h, a role is a
// template over the type of the warp that runs it.
//
//   producer   one thread: fills A and the steps B by TMA
//   tail       one warp: statistics of the query rows; zeros in B past a sequence's last row
//   consumer   two warpgroups of four warps, 64 rows of A each: mainloop and epilogue
//
// A CTA computes one kind of work tiles after the other (BwdPhasesOf): dkdv, dq, or dq, dk, dv.
// Their steps have pipelines of their own in the same memory.
#pragma once

#include "core/fault.h"
#include "core/sm90_bwd_work_tile.h"

namespace flashcore::core {

/// The scheduler fetches the next tile this many steps before the current one is loaded.
inline constexpr int kBwdStepsAhead = 2;

/// Waits for the next work tile; true if it has Steps::kOutput.
template <typename Steps, typename Warp>
FLASHCORE_ROLE bool next_bwd_tile(Warp& warp, BwdQueueState queue) {
  warp.template wait<Sm90BwdBarrier::tile_full>(queue);
  return warp.work(queue).output == Steps::kOutput;
}

template <typename Steps, typename Warp>
FLASHCORE_ROLE void produce_bwd_tiles(Warp& warp, BwdQueueState& queue, BwdTileState& a) {
  using B = Sm90BwdBarrier;
  typename Steps::State b;
  for (; next_bwd_tile<Steps>(warp, queue); queue.advance()) {
    const std::int32_t heads = warp.work(queue).heads;
    const std::int32_t steps = warp.work(queue).steps();
    BwdStep step{warp.work(queue).first_tile, 0};
    if (steps <= kBwdStepsAhead) warp.template arrive<B::tile_requested>(PipelineState<1>{});
    FLASHCORE_LOOP
    for (std::int32_t i = 0; i < steps; ++i, step.advance(heads), b.advance()) {
      if (i > 0 && i + kBwdStepsAhead == steps) {
        warp.template arrive<B::tile_requested>(PipelineState<1>{});
      }
      // The slots in the order of use: S of the first step needs A1 and B1.
      if (i == 0) {
        warp.template wait<B::a1_empty>(a);
        warp.template load_a1<Steps>(queue);
      }
      warp.template wait<Steps::kB1Empty>(b);
      warp.template load_b1<Steps>(queue, b, step);
      if (Steps::kHasDx && i == 0) {
        warp.template wait<B::a2_empty>(a);
        warp.template load_a2<Steps>(queue);
      }
      warp.template wait<Steps::kB2Empty>(Steps::b2(b));
      warp.template load_b2<Steps>(queue, Steps::b2(b), step);
    }
    if (steps > 0) a.advance();
    warp.template arrive<B::tile_empty>(queue);
  }
  // The memory of the steps is free when every slot is. dv steps also use A2's.
  FLASHCORE_LOOP
  for (int i = 0; i < Steps::kStages; ++i, b.advance()) {
    warp.template wait<Steps::kB1Empty>(b);
    if (i < Steps::kB2Stages) warp.template wait<Steps::kB2Empty>(Steps::b2(b));
  }
  if constexpr (Steps::kOutput == BackwardOutput::dk) {
    warp.template wait<Sm90BwdBarrier::a2_empty>(a);
  }
}

template <typename Warp, typename... Steps>
FLASHCORE_ROLE void produce_bwd(Warp& warp, BwdPhases<Steps...>) {
  BwdQueueState queue;
  BwdTileState a;
  (produce_bwd_tiles<Steps>(warp, queue, a), ...);
}

template <typename Steps, typename Warp>
FLASHCORE_ROLE void prepare_bwd_tiles(Warp& warp, BwdQueueState& queue) {
  typename Steps::State b;
  for (; next_bwd_tile<Steps>(warp, queue); queue.advance()) {
    const std::int32_t heads = warp.work(queue).heads;
    const std::int32_t steps = warp.work(queue).steps();
    BwdStep step{warp.work(queue).first_tile, 0};
    FLASHCORE_LOOP
    for (std::int32_t i = 0; i < steps; ++i, step.advance(heads), b.advance()) {
      warp.template read_rows<Steps>(queue, step);  // its latency passes during the wait
      warp.template wait<Steps::kB1Empty>(b);
      warp.template store_rows<Steps>(b);
      if (warp.template has_dirty_tail<Steps>(queue, step)) {
        warp.template wait<Steps::kB1Full>(b);
        if constexpr (Steps::kHasDv) warp.template wait<Steps::kB2Full>(Steps::b2(b));
        warp.template zero_tail<Steps>(queue, b, step);
      }
      warp.template arrive<Steps::kReady>(b);
    }
    warp.template arrive<Sm90BwdBarrier::tile_empty>(queue);
  }
  if constexpr (Steps::kOutput == BackwardOutput::dk) {
    // The statistics of dv steps have the same memory.
    FLASHCORE_LOOP
    for (int i = 0; i < Steps::kStages; ++i, b.advance()) {
      warp.template wait<Steps::kB1Empty>(b);
    }
  }
}

template <typename Warp, typename... Steps>
FLASHCORE_ROLE void prepare_bwd(Warp& warp, BwdPhases<Steps...>) {
  BwdQueueState queue;
  (prepare_bwd_tiles<Steps>(warp, queue), ...);
}

template <typename Steps, typename Warp>
FLASHCORE_ROLE void inspect_bwd_tiles(Warp& warp, BwdQueueState& queue, BwdTileState& a) {
  using B = Sm90BwdBarrier;
  for (; next_bwd_tile<Steps>(warp, queue); queue.advance()) {
    if (warp.work(queue).tiles > 0) {
      warp.template wait<B::a1_full>(a);
      warp.inspect_a1(queue);
      warp.template arrive<B::a1_empty>(a);
      if constexpr (Steps::kHasDx) {
        warp.template wait<B::a2_full>(a);
        warp.inspect_a2(queue);
        warp.template arrive<B::a2_empty>(a);
      }
      a.advance();
    }
    warp.template arrive<B::tile_empty>(queue);
  }
}

/// Looks for elements that are not finite. Every row of K, V, Q and dO that a step reads is a row
/// of A in one work tile, so that inspecting A is enough.
template <typename Warp, typename... Steps>
FLASHCORE_ROLE void inspect_bwd(Warp& warp, BwdPhases<Steps...>) {
  BwdQueueState queue;
  BwdTileState a;
  (inspect_bwd_tiles<Steps>(warp, queue, a), ...);
}

/// Releases steps that only the other warpgroup computes.
template <typename Steps, typename Warp>
FLASHCORE_ROLE void skip_bwd_steps(Warp& warp, typename Steps::State& b, std::int32_t steps) {
  FLASHCORE_LOOP
  for (; steps > 0; --steps, b.advance()) {
    warp.template wait<Steps::kB1Full>(b);
    warp.template wait<Steps::kReady>(b);
    warp.template arrive<Steps::kB1Empty>(b);
    warp.template wait<Steps::kB2Full>(Steps::b2(b));
    warp.template arrive<Steps::kB2Empty>(Steps::b2(b));
  }
}

/// The sums of a step: dV += Pᵀ dO, then dK += dZᵀ Q, or dQ += dZ K.
template <typename Steps, typename Warp>
FLASHCORE_ROLE void issue_bwd_sums(Warp& warp, typename Steps::State b, bool first) {
  if constexpr (Steps::kHasDv) warp.issue_dv(b, !first);
  if constexpr (Steps::kHasDx) warp.issue_dx(b, !first);
  if constexpr (Steps::kOutput == BackwardOutput::dq) {
    if (first && warp.has_fault(InjectedFault::dq_tile_twice)) warp.issue_dx(b, true);
  }
}

/// Releases a step after its sums. Without dV, B2 is free since dP.
template <typename Steps, typename Warp>
FLASHCORE_ROLE void release_bwd_step(Warp& warp, typename Steps::State b) {
  warp.template arrive<Steps::kB1Empty>(b);
  if constexpr (Steps::kHasDv) warp.template arrive<Steps::kB2Empty>(Steps::b2(b));
}

/// The steps of a warpgroup in a work tile. In flight at the top of the loop: S, then dP. Bounds
/// are read again where they are needed, because registers are few.
template <typename Steps, typename Warp>
FLASHCORE_ROLE void consume_bwd_steps(Warp& warp, BwdQueueState queue, BwdTileState a,
                                      typename Steps::State& b) {
  using B = Sm90BwdBarrier;
  const auto issue_s = [&] {
    warp.template wait<Steps::kB1Full>(b);
    warp.template wait<Steps::kReady>(b);
    warp.issue_s(b);
  };
  const auto issue_dp = [&] {
    warp.template wait<Steps::kB2Full>(Steps::b2(b));
    if constexpr (Steps::kHasDx) warp.issue_dp(b);
  };
  BwdStep step{warp.work(queue).group_tiles[warp.group()].begin, 0};
  warp.template wait<B::a1_full>(a);
  issue_s();
  if constexpr (Steps::kHasDx) warp.template wait<B::a2_full>(a);
  issue_dp();
  for (bool first = true;; first = false) {
    const bool last = warp.work(queue).is_last(step, warp.group());
    const bool needs_mask = warp.needs_mask(queue, step.tile);
    warp.template wgmma_wait<Steps::kHasDx ? 1 : 0>();
    if (last) warp.template arrive<B::a1_empty>(a);
    warp.probabilities(queue, b, step, needs_mask);
    if constexpr (Steps::kHasDx) {
      warp.template wgmma_wait<0>();
      if (last) warp.template arrive<B::a2_empty>(a);
      if constexpr (!Steps::kHasDv) warp.template arrive<Steps::kB2Empty>(Steps::b2(b));
    }
    warp.score_gradients(queue, b, step, needs_mask);
    issue_bwd_sums<Steps>(warp, b, first);
    const typename Steps::State used = b;
    b.advance();
    if (last) {
      warp.template wgmma_wait<0>();
      release_bwd_step<Steps>(warp, used);
      return;
    }
    step.advance(warp.work(queue).heads);
    issue_s();
    warp.template wgmma_wait<1>();
    release_bwd_step<Steps>(warp, used);
    issue_dp();
  }
}

template <typename Steps, typename Warp>
FLASHCORE_ROLE void consume_bwd_tiles(Warp& warp, BwdQueueState& queue, BwdTileState& a) {
  typename Steps::State b;
  for (; next_bwd_tile<Steps>(warp, queue); queue.advance()) {
    warp.begin_tile(queue);
    if (warp.work(queue).tiles > 0) {
      skip_bwd_steps<Steps>(warp, b, warp.work(queue).steps_before(warp.group()));
      consume_bwd_steps<Steps>(warp, queue, a, b);
      skip_bwd_steps<Steps>(warp, b, warp.work(queue).steps_after(warp.group()));
      a.advance();
    }
    warp.store_tile(queue);
    warp.template arrive<Sm90BwdBarrier::tile_empty>(queue);
  }
}

}  // namespace flashcore::core
