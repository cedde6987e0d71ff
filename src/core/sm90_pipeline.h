// The barriers of a Hopper CTA as one table: their names, arrival counts and parities. The kernels
// (cuda/sm90) and the model of their synchronisation (tests/protocol) both read it.
#pragma once

#include "core/config.h"
#include "core/sm90_traits.h"

namespace flashcore::core {

/// Slots of the item queue: the item that ends, the one that begins, and what comes next.
///
/// A consumer holds the slot of the ending item while it waits for the next one: the last P V runs
/// beside the first Q K^T of the next item. So it may wait for one item at a time only, and every
/// item must have a step. If consumers passed over items without one, three in a row would fill the
/// queue: the scheduler would wait for the held slot, its holder for the scheduler.
inline constexpr int kTileSlots = 4;

/// The mbarriers. A slot of a ring has a pair: `full` ends when it is filled, `empty` when the last
/// reader is done.
enum class Sm90Barrier : int {
  q_full,
  q_empty,
  k_full,
  k_empty,
  v_full,
  v_empty,
  tile_full,
  tile_empty,
  tile_requested,  // the producer has almost loaded an item: time to fetch the next one
  v_staging_full,  // 8-bit values as they come, before they are transposed
  v_staging_empty,
};
inline constexpr int kSm90Barriers = 11;

struct Sm90BarrierRow {
  const char* name;
  int slots;     // an mbarrier each; 0: the kernel has no such barrier
  int arrivals;  // that end a phase, once all announced bytes have come too
  bool empty;    // waited for before a slot is filled: in the first round it is free
};

/// Barrier       arrivals of                                     waited for by
/// q, k, v_full  the producer, with the bytes of its copies      consumers
///               (8-bit v: every transposing warp)
/// q, k, v_empty every consumer warp                             the producer
///               (q: of the warpgroups whose queries came        (8-bit v: transposing warps)
///               together)
/// tile_full     the scheduler                                   everybody else
/// tile_empty    everybody else                                  the scheduler
/// tile_requested   the producer                                    the scheduler
/// v_staging_full      the producer, with the bytes of its copies      transposing warps
/// v_staging_empty     transposing warps                               the producer
constexpr Sm90BarrierRow sm90_barrier(const Sm90Traits& shape, Sm90Barrier barrier) {
  const int consumer_warps = 4 * shape.consumers(), transposers = shape.transposers();
  const int together = shape.q_tiles_per_stage();
  switch (barrier) {
    case Sm90Barrier::q_full: return {"q_full", shape.q_barriers(), 1, false};
    case Sm90Barrier::q_empty: return {"q_empty", shape.q_barriers(), 4 * together, true};
    case Sm90Barrier::k_full: return {"k_full", shape.stages, 1, false};
    case Sm90Barrier::k_empty: return {"k_empty", shape.stages, consumer_warps, true};
    case Sm90Barrier::v_full:
      return {"v_full", shape.stages, shape.is_fp8() ? transposers : 1, false};
    case Sm90Barrier::v_empty: return {"v_empty", shape.stages, consumer_warps, true};
    case Sm90Barrier::tile_full: return {"item_full", kTileSlots, 1, false};
    case Sm90Barrier::tile_empty:
      return {"item_empty", kTileSlots, consumer_warps + transposers + 1, true};
    case Sm90Barrier::tile_requested: return {"item_wanted", 1, 1, false};
    case Sm90Barrier::v_staging_full: return {"raw_full", shape.v_staging_stages(), 1, false};
    case Sm90Barrier::v_staging_empty:
      return {"raw_empty", shape.v_staging_stages(), transposers, true};
  }
  return {};
}

/// Where a barrier's first slot is among all mbarriers of the CTA.
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

/// How many phases of its mbarrier must have ended before a wait returns, in the round-th use of a
/// slot. mbarrier.try_wait.parity gets the parity of the last of these phases.
FLASHCORE_HD constexpr std::uint32_t phases_before(bool empty, std::uint32_t round) {
  return round + (empty ? 0 : 1);
}
FLASHCORE_HD constexpr std::uint32_t parity_of_last(std::uint32_t phases) {
  return (phases + 1) % 2;
}

/// Named barriers: warpgroups take turns at the tensor cores (ping-pong), and a warpgroup has
/// zero-filled V rows past the last key.
inline constexpr int kPingPongThreads = 256;  // who gives the turn and who takes it
inline constexpr int kVTailThreads = 128;
FLASHCORE_HD constexpr int ping_pong_barrier(int group) { return 1 + group; }
FLASHCORE_HD constexpr int v_tail_barrier(int group) { return 9 + group; }

/// A slot of a ring, and how often it has been used before: one register.
template <int kSlots>
struct PipelineState {
  static_assert((kSlots & (kSlots - 1)) == 0);
  std::uint32_t steps = 0;
  FLASHCORE_HD constexpr std::uint32_t stage() const { return steps % kSlots; }
  FLASHCORE_HD constexpr std::uint32_t round() const { return steps / kSlots; }
  FLASHCORE_HD constexpr void next() { ++steps; }
};

using TileQueueState = PipelineState<kTileSlots>;

/// The rings of a kernel.
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
  using LoadedVState = PipelineState<kFp8 ? kShape.v_staging_stages() : kShape.stages>;
  // Which ring the producer fills with values.
  static constexpr Sm90Barrier kLoadedFull =
      kFp8 ? Sm90Barrier::v_staging_full : Sm90Barrier::v_full;
  static constexpr Sm90Barrier kLoadedEmpty =
      kFp8 ? Sm90Barrier::v_staging_empty : Sm90Barrier::v_empty;
};

}  // namespace flashcore::core
