// Model of an sm90 CTA that computes gradients in the fused form: the roles of
// core/sm90_fused_roles.h (sm90_bwd_cta.h has the split form's). CTAs wait for each other's
// additions to dQ tiles, so a launch is modelled with fewer resident CTAs than it has.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "barriers.h"
#include "core/sm90_fused_order.h"
#include "core/sm90_fused_roles.h"
#include "core/sm90_roles.h"

namespace flashcore::protocol {

using core::BackwardOutput;
using core::BwdQueueState;
using core::BwdStep;
using core::BwdTileState;
using core::FusedSteps;
using core::Sm90BwdBarrier;

/// Faults that the model injects.
enum class FusedFault {
  none,
  arrival_missing,  // a warp does not release a step
  turn_ignored,     // a dQ tile is added before its turn
  dz_not_awaited,   // dQ reads dZ before both warpgroups have stored it
  dq_not_awaited,   // dQ is staged over that of an earlier step
};

/// One dQ tile: a query tile of a head of a sequence.
struct DqTile {
  std::int32_t sequence, head, tile;
  auto operator<=>(const DqTile&) const = default;
};

struct FusedSequence {
  core::Mask mask;
  std::int32_t q_len;
};

/// A launch: its work tiles in the order of the tickets, and how often each warp has stored each.
struct FusedLaunch {
  std::vector<core::BwdSteps> tiles;
  std::vector<FusedSequence> sequences;
  core::FusedOrder order;
  std::int32_t kv_heads, group;     // query heads of a KV head
  std::int32_t num_ctas, resident;  // CTAs that run at a time
  bool dirty_tail;
  std::uint32_t ticket_counter = 0;
  std::int32_t active = 0;
  std::vector<int> written;  // [tile, consumer warp]
  std::map<DqTile, std::uint32_t> turns;

  core::FusedCoord coord(std::int32_t ticket) const { return core::coord_of(order, ticket); }
};

struct FusedModelTile : core::BwdSteps {
  std::int64_t serial = -1;  // number within the CTA
  std::int32_t index = -1;
};

inline constexpr core::Sm90FusedTraits kFusedShape{128};

/// Shared memory of a CTA.
struct FusedModelCta {
  static constexpr int kWarps = 4 * core::kBwdConsumers;

  FusedLaunch& launch;
  Fibers& fibers;
  FusedFault fault;
  std::vector<Mbarrier> mbarriers;
  std::array<FusedModelTile, core::kBwdTileSlots> work_tiles;
  std::array<BwdTileState, core::kBwdTileSlots> tile_states;
  std::array<Slot, 2> a{Slot("K"), Slot("V")};
  std::array<std::array<Slot, 2>, core::kFusedStages> b{
      std::array<Slot, 2>{Slot("Q[0]"), Slot("dO[0]")},
      std::array<Slot, 2>{Slot("Q[1]"), Slot("dO[1]")}};
  std::array<Slot, core::kFusedStages> rows{Slot("rows[0]"), Slot("rows[1]")};
  std::array<Slot, core::kFusedStages> dz{Slot("dZ[0]"), Slot("dZ[1]")};
  std::array<Slot, core::kFusedStages> dq{Slot("dQ[0]"), Slot("dQ[1]")};
  int ended = 0;

  FusedModelCta(FusedLaunch& launch_, Fibers& fibers_, FusedFault fault_)
      : launch(launch_), fibers(fibers_), fault(fault_) {
    for (int i = 0; i < core::kSm90BwdBarriers; ++i) {
      const auto row = core::sm90_barrier(kFusedShape, static_cast<Sm90BwdBarrier>(i));
      for (int slot = 0; slot < row.slots; ++slot) {
        mbarriers.emplace_back(std::string(row.name) + "[" + std::to_string(slot) + "]",
                               row.arrivals);
      }
    }
  }
  Mbarrier& mbarrier(Sm90BwdBarrier barrier, std::uint32_t slot) {
    return mbarriers[static_cast<std::size_t>(core::first_mbarrier(kFusedShape, barrier)) + slot];
  }
  /// A TMA load, which arrives at a random later time.
  void copy(Slot& slot, const Tag& tag, Sm90BwdBarrier full, std::uint32_t stage) {
    constexpr int kBytes = 64;
    Mbarrier& barrier = mbarrier(full, stage);
    barrier.arrive(fibers, kBytes);
    slot.begin_write(tag, 1);
    fibers.later([&slot, &barrier] {
      slot.end_write();
      barrier.complete_bytes(kBytes);
    });
  }
};

/// Base of the warps of all roles.
struct FusedModelWarp {
  using Barrier = Sm90BwdBarrier;
  using Queue = BwdQueueState;
  FusedModelCta& cta;

  template <Sm90BwdBarrier kBarrier, typename State>
  void wait(const State& state) {
    constexpr bool kEmpty = core::sm90_barrier(kFusedShape, kBarrier).empty;
    cta.mbarrier(kBarrier, state.stage())
        .wait(cta.fibers, core::phases_before(kEmpty, state.round()));
  }
  template <Sm90BwdBarrier kBarrier, typename State>
  void arrive(const State& state) {
    cta.mbarrier(kBarrier, state.stage()).arrive(cta.fibers);
  }
  const FusedModelTile& work(BwdQueueState queue) const {
    const FusedModelTile& work = cta.work_tiles[queue.stage()];
    if (work.serial != queue.count) throw Violation{"reads a work tile that is not in its slot"};
    return work;
  }
  /// The tag of operand `which` of a step: 0 is Q, 1 dO, 2 the rows, 3 dZ and dQ.
  Tag tag(BwdQueueState queue, const BwdStep& step, int which) const {
    return {work(queue).serial, 100 * step.tile + 10 * step.head + which};
  }
};

struct FusedModelProducer : FusedModelWarp {
  template <typename Steps>
  void load_a1(BwdQueueState queue) {
    cta.copy(cta.a[0], {work(queue).serial, 0}, Sm90BwdBarrier::a1_full, 0);
  }
  template <typename Steps>
  void load_a2(BwdQueueState queue) {
    cta.copy(cta.a[1], {work(queue).serial, 0}, Sm90BwdBarrier::a2_full, 0);
  }
  template <typename Steps>
  void load_b1(BwdQueueState queue, FusedSteps::State b, const BwdStep& step) {
    cta.copy(cta.b[b.stage()][0], tag(queue, step, 0), Steps::kB1Full, b.stage());
  }
  template <typename Steps>
  void load_b2(BwdQueueState queue, FusedSteps::State b, const BwdStep& step) {
    cta.copy(cta.b[b.stage()][1], tag(queue, step, 1), Steps::kB2Full, b.stage());
  }
};

struct FusedModelTail : FusedModelWarp {
  Tag read{};  // whose rows are in registers

  template <typename Steps>
  void read_rows(BwdQueueState queue, const BwdStep& step) {
    read = tag(queue, step, 2);
  }
  template <typename Steps>
  void store_rows(FusedSteps::State b) {
    cta.rows[b.stage()].write_part(cta.fibers, read, 1);
  }
  template <typename Steps>
  bool has_dirty_tail(BwdQueueState queue, const BwdStep& step) const {
    const core::BwdSteps& tile = work(queue);
    return cta.launch.dirty_tail && step.tile == tile.first_tile + tile.tiles - 1;
  }
  template <typename Steps>
  void zero_tail(BwdQueueState queue, FusedSteps::State b, const BwdStep& step) {
    for (int which = 0; which < 2; ++which) {
      cta.b[b.stage()][static_cast<std::size_t>(which)].check(tag(queue, step, which));
    }
  }
};

struct FusedModelScheduler : FusedModelWarp {
  BwdTileState next_with_steps{};

  std::int32_t first_index() const { return fetch_tile(); }
  std::int32_t num_scheduled() const { return cta.launch.order.tiles; }
  std::int32_t fetch_tile() const {
    cta.fibers.may_pause();
    const auto last = static_cast<std::uint32_t>(num_scheduled() + cta.launch.num_ctas - 1);
    return static_cast<std::int32_t>(count_and_wrap(cta.launch.ticket_counter, last));
  }
  bool decode_work_tile(BwdQueueState queue, std::int32_t index) {
    FusedModelTile& tile = cta.work_tiles[queue.stage()];
    tile.serial = -1;
    cta.fibers.may_pause();
    const core::BwdSteps& steps = cta.launch.tiles[static_cast<std::size_t>(index)];
    if (steps.rows <= 0) return false;
    static_cast<core::BwdSteps&>(tile) = steps;
    tile.index = index;
    tile.serial = queue.count;
    cta.tile_states[queue.stage()] = next_with_steps;
    if (steps.tiles > 0) next_with_steps.advance();
    return true;
  }
  void mark_end(BwdQueueState queue) {
    FusedModelTile& tile = cta.work_tiles[queue.stage()];
    tile.output = core::kBwdQueueEnd;
    tile.serial = queue.count;
  }
};

struct FusedModelStore : FusedModelWarp {
  struct Turn {
    DqTile tile{};
    std::uint32_t turn = 0;
    Tag staged{};
    bool come = false;
  };
  Turn now{}, next{};
  Slot* reading = nullptr;

  void look_at_turn(BwdQueueState queue, const BwdStep& step) {
    const core::FusedCoord at = cta.launch.coord(work(queue).index);
    const FusedSequence& sequence = cta.launch.sequences[static_cast<std::size_t>(at.batch)];
    next.tile = {at.batch, at.head * cta.launch.group + step.head, step.tile};
    next.turn = core::turn_of(sequence.mask, sequence.q_len, step.tile, at.key_tile);
    next.staged = tag(queue, step, 3);
    cta.fibers.may_pause();
    next.come = cta.launch.turns[next.tile] == next.turn;
  }
  void wait_turn() {
    now = next;
    if (now.come || cta.fault == FusedFault::turn_ignored) return;
    const std::uint32_t& count = cta.launch.turns[now.tile];
    cta.fibers.wait_until([&] { return count == now.turn; }, "the turn of a dQ tile");
  }
  void add_dq(FusedSteps::State b) {
    if (cta.launch.turns[now.tile] != now.turn)
      throw Violation{"adds to a dQ tile before its turn"};
    cta.dq[b.stage()].begin_read(now.staged);
    cta.fibers.may_pause();
    reading = &cta.dq[b.stage()];
  }
  void wait_read() { reading->end_read(); }
  void pass_turn() {
    cta.fibers.may_pause();
    cta.launch.turns[now.tile] = now.turn + 1;
  }
};

/// A consumer warp. Registers hold tags: the steps of S and dP, and those that the sums contain.
struct FusedModelConsumer : FusedModelWarp {
  using State = FusedSteps::State;
  static constexpr int kWarps = FusedModelCta::kWarps;
  int warp;  // index among the consumer warps of the CTA
  Tag s{}, dp{}, dz{}, dq{};
  std::vector<Tag> dv{}, dk{};
  std::deque<std::vector<Slot*>> gemms{};  // GEMMs in flight, and the tiles they read
  BwdQueueState queue{};
  BwdStep next{};  // whose S is issued next
  bool dropped = false;

  template <Sm90BwdBarrier kBarrier, typename State_>
  void wait(const State_& state) {
    if (kBarrier == Sm90BwdBarrier::dz_full && cta.fault == FusedFault::dz_not_awaited) return;
    if (kBarrier == Sm90BwdBarrier::dq_empty && cta.fault == FusedFault::dq_not_awaited) return;
    FusedModelWarp::wait<kBarrier>(state);
  }
  template <Sm90BwdBarrier kBarrier, typename State_>
  void arrive(const State_& state) {
    const bool drops = cta.fault == FusedFault::arrival_missing && !dropped;
    if (kBarrier == Sm90BwdBarrier::q_empty && drops) {
      dropped = true;
      return;
    }
    FusedModelWarp::arrive<kBarrier>(state);
  }
  void begin_tile(BwdQueueState queue_) {
    queue = queue_;
    next = core::first_fused_step(work(queue));
    dv.clear();
    dk.clear();
  }
  BwdTileState tile_state(BwdQueueState queue_) const { return cta.tile_states[queue_.stage()]; }
  static State uniform(State b) { return b; }
  bool needs_mask(BwdQueueState, std::int32_t) const { return false; }
  void inspect_keys(BwdQueueState queue_) {
    for (const Slot& slot : cta.a) slot.check({work(queue_).serial, 0});
  }

  void issue_s(State b) {
    s = tag(queue, next, 0);
    issue(&cta.a[0], cta.b[b.stage()][0], s);
  }
  void issue_dp(State b) {
    dp = tag(queue, next, 1);
    issue(&cta.a[1], cta.b[b.stage()][1], dp);
    core::advance_down(next, work(queue).heads);
  }
  void issue_dv(State b, bool) {
    issue(nullptr, cta.b[b.stage()][1], dp);
    dv.push_back(dp);
  }
  void issue_dx(State b, bool) {
    issue(nullptr, cta.b[b.stage()][0], s);
    dk.push_back(s);
  }
  void issue_dq(State b) {
    dq = dz;
    issue(&cta.a[0], cta.dz[b.stage()], dq);
  }
  void stage_dz(State b) {
    dz = {s.work_tile, s.tile + 3};
    cta.dz[b.stage()].write_part(cta.fibers, dz, kWarps);
  }
  void stage_dq(State b) {
    expect(gemms.empty(), "stages dQ before its GEMM ends");
    cta.dq[b.stage()].write_part(cta.fibers, dq, kWarps);
  }

  template <int kPending>
  void wgmma_wait() {
    cta.fibers.may_pause();
    while (gemms.size() > kPending) {
      for (Slot* slot : gemms.front()) slot->end_read();
      gemms.pop_front();
    }
  }
  void probabilities(BwdQueueState, State b, const BwdStep& step, bool) {
    expect(gemms.size() <= 1, "reads S before its GEMM ends");
    expect(s == tag(queue, step, 0), "P of another step");
    cta.rows[b.stage()].check(tag(queue, step, 2));
  }
  void score_gradients(BwdQueueState, State b, const BwdStep& step, bool) {
    expect(gemms.empty(), "reads dP before its GEMM ends");
    expect(dp == tag(queue, step, 1), "dZ of another step");
    cta.rows[b.stage()].check(tag(queue, step, 2));
  }
  void store_tile(BwdQueueState) {
    expect(gemms.empty(), "reads a sum before its GEMM ends");
    const FusedModelTile& tile = work(queue);
    std::vector<Tag> want;
    BwdStep step = core::first_fused_step(tile);
    for (std::int32_t i = 0; i < tile.steps(); ++i, core::advance_down(step, tile.heads)) {
      want.push_back(tag(queue, step, 0));
    }
    expect(dk == want, "stores a dK of other steps");
    for (Tag& one : want) ++one.tile;
    expect(dv == want, "stores a dV of other steps");
    ++cta.launch.written[static_cast<std::size_t>(tile.index * kWarps + warp)];
  }

 private:
  /// left: K or V, or null for an operand in registers.
  void issue(Slot* left, Slot& right, const Tag& tag_of_right) {
    right.begin_read(tag_of_right);
    std::vector<Slot*> slots{&right};
    if (left != nullptr) {
      left->begin_read({work(queue).serial, 0});
      slots.push_back(left);
    }
    gemms.push_back(std::move(slots));
    cta.fibers.may_pause();
  }
  static void expect(bool right, const char* text) {
    if (!right) throw Violation{text};
  }
};

/// Adds the fibers of a CTA, which starts when fewer than `resident` CTAs run.
inline void add_fused_cta(Fibers& fibers, FusedModelCta& cta, const std::string& name) {
  const auto add = [&](const std::string& role, auto body) {
    fibers.add(name + role, [&cta, body] {
      body(cta);
      constexpr int kRoles = 4 + FusedModelCta::kWarps;
      if (++cta.ended == kRoles) --cta.launch.active;
    });
  };
  add("scheduler", [](FusedModelCta& own) {
    own.fibers.wait_until([&own] { return own.launch.active < own.launch.resident; }, "an SM");
    ++own.launch.active;
    FusedModelScheduler warp{{own}};
    core::schedule_tiles(warp);
  });
  add("producer", [](FusedModelCta& own) {
    FusedModelProducer warp{{own}};
    core::produce_fused(warp);
  });
  add("tail warp", [](FusedModelCta& own) {
    FusedModelTail warp{{own}};
    core::prepare_fused(warp);
  });
  add("store thread", [](FusedModelCta& own) {
    FusedModelStore warp{{own}};
    core::store_fused(warp);
  });
  for (int w = 0; w < FusedModelCta::kWarps; ++w) {
    add("consumer " + std::to_string(w), [w](FusedModelCta& own) {
      FusedModelConsumer warp{{own}, w};
      core::consume_fused(warp);
    });
  }
}

/// Runs a launch to its end. Throws Violation, also if CTAs wait for each other.
inline void run_fused_model(FusedLaunch& launch, FusedFault fault, std::uint64_t seed) {
  constexpr auto kWarps = static_cast<std::size_t>(FusedModelCta::kWarps);
  launch.written.assign(launch.tiles.size() * kWarps, 0);
  Fibers fibers(seed);
  std::deque<FusedModelCta> ctas;
  for (std::int32_t i = 0; i < launch.num_ctas; ++i) {
    add_fused_cta(fibers, ctas.emplace_back(launch, fibers, fault),
                  "CTA " + std::to_string(i) + " ");
  }
  fibers.run();
  for (std::size_t i = 0; i < launch.written.size(); ++i) {
    const int want = launch.tiles[i / kWarps].rows > 0 ? 1 : 0;
    if (launch.written[i] != want) {
      throw Violation{"a warp stores its rows " + std::to_string(launch.written[i]) + " times"};
    }
  }
  if (launch.ticket_counter != 0) throw Violation{"the ticket counter is not 0 after the launch"};
}

}  // namespace flashcore::protocol
