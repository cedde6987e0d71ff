// The barriers of a Hopper CTA that computes gradients, as one table: names, arrival counts and
// phases (core/sm90_pipeline.h has those of the forward).
#pragma once

#include <type_traits>

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
  // The steps of a dkdv or dk tile: B1 is Q, B2 is dO.
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
  // The steps of a dv tile: B1 is Q, B2 is dO.
  dv_q_full,
  dv_q_empty,
  dv_dout_full,
  dv_dout_empty,
  dv_rows_ready,
  // Fused kernels alone use these (core/sm90_fused_pipeline.h).
  dz_full,
  dz_empty,
  dq_full,
  dq_empty,
};
inline constexpr int kSm90BwdBarriers = 26;

/// Barrier                completed by                               waited on by
/// a1, a2, q, dout, k,    producer, with the bytes of its TMA loads  consumers; A also the
/// inspector, v_full                                                            B1 and B2 the tail
/// warp
/// ..._empty              every consumer warp; of A also the         producer; empty of B1 also
///                        inspector                                  the tail warp
/// ..._ready              tail warp                                  consumers
/// tile_full              scheduler                                  all other roles
/// tile_empty             all other roles                            scheduler
/// tile_requested         producer                                   scheduler
constexpr Sm90BarrierRow sm90_barrier(const Sm90BwdTraits& shape, Sm90BwdBarrier barrier) {
  constexpr int kWarps = 4 * kBwdConsumers;
  using Kind = BackwardOutput;
  const Kind of_keys = shape.splits_dkdv() ? Kind::dk : Kind::dkdv;
  const int q = shape.b1_stages(of_keys), dout = shape.b2_stages(of_keys);
  const int k = shape.b1_stages(Kind::dq), v = shape.b2_stages(Kind::dq);
  const int dv_q = shape.splits_dkdv() ? shape.b1_stages(Kind::dv) : 0;
  const int dv_dout = shape.splits_dkdv() ? shape.b2_stages(Kind::dv) : 0;
  switch (barrier) {
    case Sm90BwdBarrier::a1_full: return {"a1_full", 1, 1, false};
    case Sm90BwdBarrier::a1_empty: return {"a1_empty", 1, kWarps + 1, true};
    case Sm90BwdBarrier::a2_full: return {"a2_full", 1, 1, false};
    case Sm90BwdBarrier::a2_empty: return {"a2_empty", 1, kWarps + 1, true};
    case Sm90BwdBarrier::q_full: return {"q_full", q, 1, false};
    case Sm90BwdBarrier::q_empty: return {"q_empty", q, kWarps, true};
    case Sm90BwdBarrier::dout_full: return {"dout_full", dout, 1, false};
    case Sm90BwdBarrier::dout_empty: return {"dout_empty", dout, kWarps, true};
    case Sm90BwdBarrier::rows_ready: return {"rows_ready", q, 1, false};
    case Sm90BwdBarrier::k_full: return {"k_full", k, 1, false};
    case Sm90BwdBarrier::k_empty: return {"k_empty", k, kWarps, true};
    case Sm90BwdBarrier::v_full: return {"v_full", v, 1, false};
    case Sm90BwdBarrier::v_empty: return {"v_empty", v, kWarps, true};
    case Sm90BwdBarrier::keys_ready: return {"keys_ready", k, 1, false};
    case Sm90BwdBarrier::tile_full: return {"tile_full", kBwdTileSlots, 1, false};
    case Sm90BwdBarrier::tile_empty: return {"tile_empty", kBwdTileSlots, kWarps + 3, true};
    case Sm90BwdBarrier::tile_requested: return {"tile_requested", 1, 1, false};
    case Sm90BwdBarrier::dv_q_full: return {"dv_q_full", dv_q, 1, false};
    case Sm90BwdBarrier::dv_q_empty: return {"dv_q_empty", dv_q, kWarps, true};
    case Sm90BwdBarrier::dv_dout_full: return {"dv_dout_full", dv_dout, 1, false};
    case Sm90BwdBarrier::dv_dout_empty: return {"dv_dout_empty", dv_dout, kWarps, true};
    case Sm90BwdBarrier::dv_rows_ready: return {"dv_rows_ready", dv_q, 1, false};
    case Sm90BwdBarrier::dz_full:
    case Sm90BwdBarrier::dz_empty:
    case Sm90BwdBarrier::dq_full:
    case Sm90BwdBarrier::dq_empty: return {};
  }
  return {};
}

/// Index of a barrier's first slot among all mbarriers of the CTA.
template <typename Shape>
constexpr int first_mbarrier(const Shape& shape, Sm90BwdBarrier barrier) {
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

/// The steps of one kind of work tiles: their pipeline and their products.
template <Sm90BwdTraits kShape, BackwardOutput kOutput_>
struct BwdStepsOf {
  static constexpr BackwardOutput kOutput = kOutput_;
  static constexpr bool kOfKeys = kOutput != BackwardOutput::dq;  // rows of A are keys
  static constexpr bool kHasDv = kOutput == BackwardOutput::dkdv || kOutput == BackwardOutput::dv;
  static constexpr bool kHasDx = kOutput != BackwardOutput::dv;  // dK or dQ, which need dP
  static constexpr int kRows = kShape.step(kOutput);             // of B
  static constexpr int kStages = kShape.b1_stages(kOutput);
  static constexpr int kB2Stages = kShape.b2_stages(kOutput);
  using State = PipelineState<kStages>;
  using B2State = PipelineState<kB2Stages>;
  /// The state of B2's pipeline in the same step.
  FLASHCORE_HD static constexpr B2State b2(State b) { return {b.count}; }
};

/// dkdv or dk tiles.
template <Sm90BwdTraits kShape, BackwardOutput kOutput>
struct QuerySteps : BwdStepsOf<kShape, kOutput> {
  static constexpr auto kB1Full = Sm90BwdBarrier::q_full, kB1Empty = Sm90BwdBarrier::q_empty,
                        kB2Full = Sm90BwdBarrier::dout_full, kB2Empty = Sm90BwdBarrier::dout_empty,
                        kReady = Sm90BwdBarrier::rows_ready;
};

template <Sm90BwdTraits kShape>
struct DvSteps : BwdStepsOf<kShape, BackwardOutput::dv> {
  static constexpr auto kB1Full = Sm90BwdBarrier::dv_q_full, kB1Empty = Sm90BwdBarrier::dv_q_empty,
                        kB2Full = Sm90BwdBarrier::dv_dout_full,
                        kB2Empty = Sm90BwdBarrier::dv_dout_empty,
                        kReady = Sm90BwdBarrier::dv_rows_ready;
};

template <Sm90BwdTraits kShape>
struct DqSteps : BwdStepsOf<kShape, BackwardOutput::dq> {
  static constexpr auto kB1Full = Sm90BwdBarrier::k_full, kB1Empty = Sm90BwdBarrier::k_empty,
                        kB2Full = Sm90BwdBarrier::v_full, kB2Empty = Sm90BwdBarrier::v_empty,
                        kReady = Sm90BwdBarrier::keys_ready;
};

template <typename... Steps>
struct BwdPhases {};

/// The kinds of work tiles in the order in which a CTA computes them. dv comes last: its steps use
/// A2's memory, and the phases of A2's barriers do not count its tiles. dk before dq would spill.
template <Sm90BwdTraits kShape>
using BwdPhasesOf = std::conditional_t<
    kShape.splits_dkdv(),
    BwdPhases<DqSteps<kShape>, QuerySteps<kShape, BackwardOutput::dk>, DvSteps<kShape>>,
    BwdPhases<QuerySteps<kShape, BackwardOutput::dkdv>, DqSteps<kShape>>>;

}  // namespace flashcore::core
