// The barriers of a fused Hopper CTA that computes gradients, and its steps. Barriers have the
// names of the split form (core/sm90_bwd_pipeline.h).
#pragma once

#include "core/sm90_bwd_pipeline.h"
#include "core/sm90_fused_traits.h"

namespace flashcore::core {

static_assert(kFusedTileRows == kBwdTileRows && kFusedStages == kBwdConsumers);

/// Barrier               completed by                               waited on by
/// a1, a2, q, dout_full  producer, with the bytes of its TMA loads  consumers; q and dout also the
///                                                                  tail warp
/// ..._empty             every consumer warp                        producer; q also the tail warp
/// rows_ready            tail warp                                  consumers
/// tile_full             scheduler                                  all other roles
/// tile_empty            all other roles                            scheduler
/// tile_requested        producer                                   scheduler
/// dz_full               every consumer warp: dZ of a step            consumers
/// dz_empty              every consumer warp: it has dQ of the step   consumers
/// dq_full               every consumer warp: dQ is in shared memory  store thread
/// dq_empty              store thread                                 consumers
constexpr Sm90BarrierRow sm90_barrier(const Sm90FusedTraits&, Sm90BwdBarrier barrier) {
  constexpr int kWarps = 4 * kBwdConsumers, kStages = kFusedStages;
  switch (barrier) {
    case Sm90BwdBarrier::a1_full: return {"a1_full", 1, 1, false};
    case Sm90BwdBarrier::a1_empty: return {"a1_empty", 1, kWarps, true};
    case Sm90BwdBarrier::a2_full: return {"a2_full", 1, 1, false};
    case Sm90BwdBarrier::a2_empty: return {"a2_empty", 1, kWarps, true};
    case Sm90BwdBarrier::q_full: return {"q_full", kStages, 1, false};
    case Sm90BwdBarrier::q_empty: return {"q_empty", kStages, kWarps, true};
    case Sm90BwdBarrier::dout_full: return {"dout_full", kStages, 1, false};
    case Sm90BwdBarrier::dout_empty: return {"dout_empty", kStages, kWarps, true};
    case Sm90BwdBarrier::rows_ready: return {"rows_ready", kStages, 1, false};
    case Sm90BwdBarrier::tile_full: return {"tile_full", kBwdTileSlots, 1, false};
    case Sm90BwdBarrier::tile_empty: return {"tile_empty", kBwdTileSlots, kWarps + 3, true};
    case Sm90BwdBarrier::tile_requested: return {"tile_requested", 1, 1, false};
    case Sm90BwdBarrier::dz_full: return {"dz_full", kStages, kWarps, false};
    case Sm90BwdBarrier::dz_empty: return {"dz_empty", kStages, kWarps, true};
    case Sm90BwdBarrier::dq_full: return {"dq_full", kStages, kWarps, false};
    case Sm90BwdBarrier::dq_empty: return {"dq_empty", kStages, 1, true};
    default: return {};
  }
}

constexpr int mbarrier_count(const Sm90FusedTraits& shape) {
  return first_mbarrier(shape, static_cast<Sm90BwdBarrier>(kSm90BwdBarriers));
}

/// A step of a work tile: B1 is Q, B2 is dO.
struct FusedSteps {
  static constexpr BackwardOutput kOutput = BackwardOutput::dkdv;
  static constexpr bool kOfKeys = true, kHasDv = true, kHasDx = true;
  static constexpr int kRows = kFusedStepRows;
  static constexpr int kStages = kFusedStages;
  using State = PipelineState<kStages>;
  using B2State = State;
  FLASHCORE_HD static constexpr B2State b2(State b) { return b; }
  static constexpr auto kB1Full = Sm90BwdBarrier::q_full, kB1Empty = Sm90BwdBarrier::q_empty,
                        kB2Full = Sm90BwdBarrier::dout_full, kB2Empty = Sm90BwdBarrier::dout_empty,
                        kReady = Sm90BwdBarrier::rows_ready;
};

}  // namespace flashcore::core
