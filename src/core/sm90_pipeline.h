// The barriers of a Hopper CTA as one table: names, arrival counts and phases. The kernels
// (cuda/sm90) and the model of their synchronisation (tests/protocol) both read it.
#pragma once

#include "core/config.h"
#include "core/sm90_traits.h"

namespace flashcore::core {

/// Slots of the tile queue: for the tile that ends, the tile that begins, and the next two.
///
/// A consumer holds the slot of the ending tile while it waits for the next tile: the last P V
/// overlaps the first Q K^T of the next tile. So it may wait for one tile at a time only, and every
/// tile must have a step. If consumers skipped tiles without one, three in a row would fill the
/// queue: the scheduler would wait for the held slot, and its holder for the scheduler.
inline constexpr int kTileSlots = 4;

/// The mbarriers. A slot of a pipeline has a pair: `full` completes when the slot is filled,
/// `empty` when its last reader is done.
enum class Sm90Barrier : int {
  q_full,
  q_empty,
  k_full,
  k_empty,
  v_full,
  v_empty,
  tile_full,
  tile_empty,
  tile_requested,  // the producer has almost loaded a tile: the scheduler fetches the next one
  v_staging_full,  // fp8 V before its transpose
  v_staging_empty,
};
inline constexpr int kSm90Barriers = 11;

struct Sm90BarrierRow {
  const char* name;
  int slots;     // an mbarrier each; 0: the kernel has no such barrier
  int arrivals;  // per phase, besides the expected bytes
  bool empty;    // waited on before a slot is filled; the first wait returns at once
};

/// Barrier           completed by                                waited on by
/// q, k, v_full      producers, with the bytes of their loads    consumers
///                   (q: the first; fp8 v: transpose warps)
/// q, k, v_empty     every consumer warp (q: of the warpgroups   producer
///                   whose Q tiles were loaded together)         (fp8 v: transpose warps)
/// tile_full         scheduler                                   all other roles
/// tile_empty        all other roles                             scheduler
/// tile_requested    the first producer                          scheduler
/// v_staging_full    producer, with the bytes of its TMA loads   transpose warps
/// v_staging_empty   transpose warps                             producer
///
/// Each of several producers arrives at every phase of k_full and v_full, even if it loads nothing
/// of the tile: so none lags by two phases, which have the same parity.
constexpr Sm90BarrierRow sm90_barrier(const Sm90Traits& shape, Sm90Barrier barrier,
                                      int producers = 1) {
  const int consumer_warps = 4 * shape.consumers(), transposers = shape.transposers();
  const int together = shape.q_tiles_per_stage(), staging = shape.v_staging_stages();
  switch (barrier) {
    case Sm90Barrier::q_full: return {"q_full", shape.q_barriers(), 1, false};
    case Sm90Barrier::q_empty: return {"q_empty", shape.q_barriers(), 4 * together, true};
    case Sm90Barrier::k_full: return {"k_full", shape.stages, producers, false};
    case Sm90Barrier::k_empty: return {"k_empty", shape.stages, consumer_warps, true};
    case Sm90Barrier::v_full:
      return {"v_full", shape.stages, shape.is_fp8() ? transposers : producers, false};
    case Sm90Barrier::v_empty: return {"v_empty", shape.stages, consumer_warps, true};
    case Sm90Barrier::tile_full: return {"tile_full", kTileSlots, 1, false};
    case Sm90Barrier::tile_empty:
      return {"tile_empty", kTileSlots, consumer_warps + transposers + producers, true};
    case Sm90Barrier::tile_requested: return {"tile_requested", 1, 1, false};
    case Sm90Barrier::v_staging_full: return {"v_staging_full", staging, 1, false};
    case Sm90Barrier::v_staging_empty: return {"v_staging_empty", staging, transposers, true};
  }
  return {};
}

/// Index of a barrier's first slot among all mbarriers of the CTA.
constexpr int first_mbarrier(const Sm90Traits& shape, Sm90Barrier barrier) {
  int first = 0;
  for (int i = 0; i < static_cast<int>(barrier); ++i) {
    first += sm90_barrier(shape, static_cast<Sm90Barrier>(i)).slots;
  }
  return first;
}

constexpr int mbarrier_count(const Sm90Traits& shape) {
  return first_mbarrier(shape, static_cast<Sm90Barrier>(kSm90Barriers));
}

/// Phases of an mbarrier that must be complete before a wait returns. round: earlier uses of its
/// slot. mbarrier.try_wait.parity takes the parity of the last of these phases.
FLASHCORE_HD constexpr std::uint32_t phases_before(bool empty, std::uint32_t round) {
  return round + (empty ? 0 : 1);
}
FLASHCORE_HD constexpr std::uint32_t parity_of_last(std::uint32_t phases) {
  return (phases + 1) % 2;
}

/// Named barriers (bar.sync). Ping-pong: a warpgroup waits for its turn to issue GEMMs. V tail: a
/// warpgroup has zero-filled the V rows past the last key.
enum class NamedBarrier : int {
  cta = 0,  // __syncthreads()
  ping_pong_wg0 = 1,
  ping_pong_wg1,
  ping_pong_wg2,
  v_tail_wg0 = 9,
  v_tail_wg1,
  v_tail_wg2,
};
inline constexpr int kPingPongThreads = 256;  // the warpgroup that waits and the one that arrives
inline constexpr int kVTailThreads = 128;
FLASHCORE_HD constexpr NamedBarrier ping_pong_barrier(int group) {
  return static_cast<NamedBarrier>(static_cast<int>(NamedBarrier::ping_pong_wg0) + group);
}
FLASHCORE_HD constexpr NamedBarrier v_tail_barrier(int group) {
  return static_cast<NamedBarrier>(static_cast<int>(NamedBarrier::v_tail_wg0) + group);
}

/// Position in a pipeline: a slot and the number of its earlier uses, in one register.
template <int kSlots>
struct PipelineState {
  static_assert((kSlots & (kSlots - 1)) == 0);
  std::uint32_t count = 0;
  FLASHCORE_HD constexpr std::uint32_t stage() const { return count % kSlots; }
  FLASHCORE_HD constexpr std::uint32_t round() const { return count / kSlots; }
  FLASHCORE_HD constexpr void advance() { ++count; }
};

using TileQueueState = PipelineState<kTileSlots>;

/// The pipelines of a kernel.
template <Sm90Traits kShape_>
struct Sm90Pipeline {
  static constexpr Sm90Traits kShape = kShape_;
  static constexpr int kConsumers = kShape.consumers();
  static constexpr int kQStages = kShape.q_stages();
  static constexpr int kQTilesPerBarrier = kShape.q_tiles_per_stage();
  static constexpr bool kFp8 = kShape.is_fp8();
  using QStage = core::QStage<kConsumers, kQStages, kQTilesPerBarrier>;
  static_assert(QStage::kBarriers == kShape.q_barriers());
  using KvState = PipelineState<kShape.stages>;
  // The producer loads V into the staging buffer (fp8) or straight into the V pipeline.
  using LoadedVState = PipelineState<kFp8 ? kShape.v_staging_stages() : kShape.stages>;
  static constexpr Sm90Barrier kLoadedVFull =
      kFp8 ? Sm90Barrier::v_staging_full : Sm90Barrier::v_full;
  static constexpr Sm90Barrier kLoadedVEmpty =
      kFp8 ? Sm90Barrier::v_staging_empty : Sm90Barrier::v_empty;
};

}  // namespace flashcore::core
