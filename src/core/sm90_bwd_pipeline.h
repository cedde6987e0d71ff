// The barriers of a Hopper CTA that computes gradients, as one table: names, arrival counts and
// phases (core/sm90_pipeline.h has those of the forward).
#pragma once

#include "core/backward_tiles.h"
#include "core/sm90_bwd_traits.h"
#include "core/sm90_pipeline.h"

namespace flashcore::core {

/// Slots of the tile queue: for the tile in progress and the next one.
inline constexpr int kBwdTileSlots = 2;

enum class Sm90BwdBarrier : int {
  a1_full,
  a1_empty,
  a2_full,
  a2_empty,
  // The steps of a dkdv tile: B1 is Q, B2 is dO.
  q_full,
  q_empty,
  dout_full,
  dout_empty,
  rows_ready,  // statistics of the query rows; Q and dO past the last row are zero
  // The steps of a dq tile: B1 is K, B2 is V.
  k_full,
  k_empty,
  v_full,
  v_empty,
  keys_ready,  // K past the last key is zero
  tile_full,
  tile_empty,
  tile_requested,  // the producer has almost loaded a tile: the scheduler fetches the next one
};
inline constexpr int kSm90BwdBarriers = 17;

/// Barrier                completed by                               waited on by
/// a1, a2, q, dout, k,    producer, with the bytes of its TMA loads  consumers; A also the inspector,
/// v_full                                                            B1 and B2 the tail warp
/// ..._empty              every consumer warp; of A also the         producer; q and k_empty also
///                        inspector                                  the tail warp
/// rows_ready, keys_ready tail warp                                  consumers
/// tile_full              scheduler                                  all other roles
/// tile_empty             all other roles                            scheduler
/// tile_requested         producer                                   scheduler
constexpr Sm90BarrierRow sm90_barrier(const Sm90BwdTraits& shape, Sm90BwdBarrier barrier) {
  constexpr int kWarps = 4 * kBwdConsumers;
  const int queries = shape.dkdv_stages(), keys = shape.dq_stages();
  switch (barrier) {
    case Sm90BwdBarrier::a1_full: return {"a1_full", 1, 1, false};
    case Sm90BwdBarrier::a1_empty: return {"a1_empty", 1, kWarps + 1, true};
    case Sm90BwdBarrier::a2_full: return {"a2_full", 1, 1, false};
    case Sm90BwdBarrier::a2_empty: return {"a2_empty", 1, kWarps + 1, true};
    case Sm90BwdBarrier::q_full: return {"q_full", queries, 1, false};
    case Sm90BwdBarrier::q_empty: return {"q_empty", queries, kWarps, true};
    case Sm90BwdBarrier::dout_full: return {"dout_full", queries, 1, false};
    case Sm90BwdBarrier::dout_empty: return {"dout_empty", queries, kWarps, true};
    case Sm90BwdBarrier::rows_ready: return {"rows_ready", queries, 1, false};
    case Sm90BwdBarrier::k_full: return {"k_full", keys, 1, false};
    case Sm90BwdBarrier::k_empty: return {"k_empty", keys, kWarps, true};
    case Sm90BwdBarrier::v_full: return {"v_full", keys, 1, false};
    case Sm90BwdBarrier::v_empty: return {"v_empty", keys, kWarps, true};
    case Sm90BwdBarrier::keys_ready: return {"keys_ready", keys, 1, false};
    case Sm90BwdBarrier::tile_full: return {"tile_full", kBwdTileSlots, 1, false};
    case Sm90BwdBarrier::tile_empty: return {"tile_empty", kBwdTileSlots, kWarps + 3, true};
    case Sm90BwdBarrier::tile_requested: return {"tile_requested", 1, 1, false};
  }
  return {};
}

/// Index of a barrier's first slot among all mbarriers of the CTA.
constexpr int first_mbarrier(const Sm90BwdTraits& shape, Sm90BwdBarrier barrier) {
  int first = 0;
  for (int i = 0; i < static_cast<int>(barrier); ++i) {
    first += sm90_barrier(shape, static_cast<Sm90BwdBarrier>(i)).slots;
  }
  return first;
}

constexpr int mbarrier_count(const Sm90BwdTraits& shape) {
  return first_mbarrier(shape, static_cast<Sm90BwdBarrier>(kSm90BwdBarriers));
}

using BwdQueueState = PipelineState<kBwdTileSlots>;
using BwdTileState = PipelineState<1>;  // A of a work tile that has steps

/// The pipeline of the steps of a dkdv tile.
template <Sm90BwdTraits kShape>
struct DkDvSteps {
  static constexpr BackwardOutput kOutput = BackwardOutput::dkdv;
  static constexpr int kRows = kShape.dkdv_step();  // of B
  static constexpr int kStages = kShape.dkdv_stages();
  using State = PipelineState<kStages>;
  static constexpr auto kB1Full = Sm90BwdBarrier::q_full, kB1Empty = Sm90BwdBarrier::q_empty,
                        kB2Full = Sm90BwdBarrier::dout_full, kB2Empty = Sm90BwdBarrier::dout_empty,
                        kReady = Sm90BwdBarrier::rows_ready;
};

/// The pipeline of the steps of a dq tile.
template <Sm90BwdTraits kShape>
struct DqSteps {
  static constexpr BackwardOutput kOutput = BackwardOutput::dq;
  static constexpr int kRows = kShape.dq_step();
  static constexpr int kStages = kShape.dq_stages();
  using State = PipelineState<kStages>;
  static constexpr auto kB1Full = Sm90BwdBarrier::k_full, kB1Empty = Sm90BwdBarrier::k_empty,
                        kB2Full = Sm90BwdBarrier::v_full, kB2Empty = Sm90BwdBarrier::v_empty,
                        kReady = Sm90BwdBarrier::keys_ready;
};

}  // namespace flashcore::core
