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
inline constexpr int kItemSlots = 4;

/// The mbarriers. A slot of a ring has a pair: `full` ends when it is filled, `empty` when the last
/// reader is done.
enum class Sm90Barrier : int {
  q_full,
  q_empty,
  k_full,
  k_empty,
  v_full,
  v_empty,
  item_full,
  item_empty,
  item_wanted,  // the producer has almost loaded an item: time to fetch the next one
  raw_full,     // 8-bit values as they come, before they are transposed
  raw_empty,
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
/// item_full     the scheduler                                   everybody else
/// item_empty    everybody else                                  the scheduler
/// item_wanted   the producer                                    the scheduler
/// raw_full      the producer, with the bytes of its copies      transposing warps
/// raw_empty     transposing warps                               the producer
constexpr Sm90BarrierRow sm90_barrier(const Sm90Shape& shape, Sm90Barrier barrier) {
  const int consumer_warps = 4 * shape.consumers(), transposers = shape.transposers();
  const int together = shape.query_pieces_together();
  switch (barrier) {
    case Sm90Barrier::q_full: return {"q_full", shape.query_barriers(), 1, false};
    case Sm90Barrier::q_empty: return {"q_empty", shape.query_barriers(), 4 * together, true};
    case Sm90Barrier::k_full: return {"k_full", shape.stages, 1, false};
    case Sm90Barrier::k_empty: return {"k_empty", shape.stages, consumer_warps, true};
    case Sm90Barrier::v_full:
      return {"v_full", shape.stages, shape.codes() ? transposers : 1, false};
    case Sm90Barrier::v_empty: return {"v_empty", shape.stages, consumer_warps, true};
    case Sm90Barrier::item_full: return {"item_full", kItemSlots, 1, false};
    case Sm90Barrier::item_empty:
      return {"item_empty", kItemSlots, consumer_warps + transposers + 1, true};
    case Sm90Barrier::item_wanted: return {"item_wanted", 1, 1, false};
    case Sm90Barrier::raw_full: return {"raw_full", shape.raw_stages(), 1, false};
    case Sm90Barrier::raw_empty: return {"raw_empty", shape.raw_stages(), transposers, true};
  }
  return {};
}

/// Where a barrier's first slot is among all mbarriers of the CTA.
constexpr int first_mbarrier(const Sm90Shape& shape, Sm90Barrier barrier) {
  int first = 0;
  for (int i = 0; i < static_cast<int>(barrier); ++i) {
    first += sm90_barrier(shape, static_cast<Sm90Barrier>(i)).slots;
  }
  return first;
}

constexpr int mbarrier_count(const Sm90Shape& shape) {
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
inline constexpr int kTurnThreads = 256;  // who gives the turn and who takes it
inline constexpr int kTailThreads = 128;
FLASHCORE_HD constexpr int turn_barrier(int group) { return 1 + group; }
FLASHCORE_HD constexpr int tail_barrier(int group) { return 9 + group; }

/// A slot of a ring, and how often it has been used before: one register.
template <int kSlots>
struct RingPlace {
  static_assert((kSlots & (kSlots - 1)) == 0);
  std::uint32_t steps = 0;
  FLASHCORE_HD constexpr std::uint32_t stage() const { return steps % kSlots; }
  FLASHCORE_HD constexpr std::uint32_t round() const { return steps / kSlots; }
  FLASHCORE_HD constexpr void next() { ++steps; }
};

using ItemPlace = RingPlace<kItemSlots>;

/// The rings of a kernel.
template <Sm90Shape kShape_>
struct Sm90Pipeline {
  static constexpr Sm90Shape kShape = kShape_;
  static constexpr int kConsumers = kShape.consumers();
  static constexpr int kQueryPlaces = kShape.query_places();
  static constexpr int kQueriesTogether = kShape.query_pieces_together();
  static constexpr bool kCodes = kShape.codes();
  using QueryPlace = core::QueryPlace<kConsumers, kQueryPlaces, kQueriesTogether>;
  static_assert(QueryPlace::kBarriers == kShape.query_barriers());
  using KvPlace = RingPlace<kShape.stages>;
  using RawPlace = RingPlace<kCodes ? kShape.raw_stages() : kShape.stages>;
  // Which ring the producer fills with values.
  static constexpr Sm90Barrier kLoadedFull = kCodes ? Sm90Barrier::raw_full : Sm90Barrier::v_full;
  static constexpr Sm90Barrier kLoadedEmpty =
      kCodes ? Sm90Barrier::raw_empty : Sm90Barrier::v_empty;
};

}  // namespace flashcore::core
