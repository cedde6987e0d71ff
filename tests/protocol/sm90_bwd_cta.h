// Model of an sm90 CTA that computes gradients: the roles of core/sm90_bwd_roles.h over modelled
// barriers and tiles, one fiber for each warp (sm90_cta.h has the forward's).
#pragma once

#include <array>
#include <deque>
#include <numeric>
#include <string>
#include <vector>

#include "barriers.h"
#include "core/sm90_bwd_roles.h"
#include "core/sm90_roles.h"

namespace flashcore::protocol {

using core::BackwardOutput;
using core::BwdQueueState;
using core::BwdStep;
using core::BwdTileState;
using core::Sm90BwdBarrier;

/// Faults that the model injects.
enum class BwdFault { none, arrival_missing, arrivals_too_few, released_early };

struct BwdModelTile : core::BwdSteps {
  std::int64_t serial = -1;  // number within the CTA
  std::int32_t index = -1;
};

/// A launch: its work tiles in the order of core::BwdPhasesOf, and how often each warp has stored
/// each.
struct BwdLaunch {
  std::vector<core::BwdSteps> tiles;
  std::int32_t num_ctas;
  bool dirty_tail;
  std::uint32_t tile_counter = 0;
  std::vector<int> written;  // [tile, consumer warp]
};

/// The largest size of which all operands of all kinds of work tiles are multiples.
constexpr int cell_bytes(const core::Sm90BwdTraits& shape) {
  int bytes = std::gcd(shape.a1_bytes(), shape.a2_bytes());
  for (const auto kind : {BackwardOutput::dkdv, BackwardOutput::dq}) {
    bytes = std::gcd(bytes, std::gcd(shape.b1_bytes(kind), shape.b2_bytes(kind)));
  }
  return bytes;
}

/// Shared memory of a CTA. The operands are ranges of cells.
template <core::Sm90BwdTraits kShape>
struct BwdModelCta {
  static constexpr int kWarps = 4 * core::kBwdConsumers;
  static constexpr int kCellBytes = cell_bytes(kShape);

  BwdLaunch& launch;
  Fibers& fibers;
  BwdFault fault;
  std::int32_t cta_index;
  std::vector<Mbarrier> mbarriers;
  std::array<BwdModelTile, core::kBwdTileSlots> work_tiles;
  std::vector<Slot> memory, rows;

  BwdModelCta(BwdLaunch& launch_, Fibers& fibers_, BwdFault fault_, std::int32_t cta_index_)
      : launch(launch_), fibers(fibers_), fault(fault_), cta_index(cta_index_) {
    for (int i = 0; i < core::kSm90BwdBarriers; ++i) {
      const auto barrier = static_cast<Sm90BwdBarrier>(i);
      const core::Sm90BarrierRow row = core::sm90_barrier(kShape, barrier);
      const bool too_few =
          fault == BwdFault::arrivals_too_few && barrier == Sm90BwdBarrier::q_empty;
      for (int slot = 0; slot < row.slots; ++slot) {
        mbarriers.emplace_back(std::string(row.name) + "[" + std::to_string(slot) + "]",
                               row.arrivals - (too_few ? 1 : 0));
      }
    }
    for (int i = 0; i < kShape.operand_bytes() / kCellBytes; ++i) {
      memory.emplace_back("memory[" + std::to_string(i) + "]");
    }
    for (int i = 0; i < kShape.query_stages(); ++i) {
      rows.emplace_back("rows[" + std::to_string(i) + "]");
    }
  }
  Mbarrier& mbarrier(Sm90BwdBarrier barrier, std::uint32_t slot) {
    return mbarriers[static_cast<std::size_t>(core::first_mbarrier(kShape, barrier)) + slot];
  }
  /// The cells of operand B1 (which = 0) or B2 (1) of a step.
  template <typename Steps>
  std::vector<Slot*> cells(int which, typename Steps::State b) {
    constexpr auto kKind = Steps::kOutput;
    const auto b1 = static_cast<int>(b.stage()), b2 = static_cast<int>(Steps::b2(b).stage());
    return which == 0 ? range(kShape.ring_begin(kKind) + b1 * kShape.b1_stride(kKind),
                              kShape.b1_bytes(kKind))
                      : range(kShape.b2_begin(kKind) + b2 * kShape.b2_stride(kKind),
                              kShape.b2_bytes(kKind));
  }
  /// The cells of A1 or A2.
  std::vector<Slot*> a_cells(int which) {
    return which == 0 ? range(0, kShape.a1_bytes()) : range(kShape.a1_bytes(), kShape.a2_bytes());
  }
  std::vector<Slot*> range(int begin, int bytes) {
    std::vector<Slot*> found;
    for (int i = begin / kCellBytes; i < (begin + bytes) / kCellBytes; ++i) {
      found.push_back(&memory[static_cast<std::size_t>(i)]);
    }
    return found;
  }
  /// A TMA load, in a box for each slot. The boxes arrive at random later times.
  void copy(const std::vector<Slot*>& slots, const Tag& tag, Sm90BwdBarrier full,
            std::uint32_t stage) {
    constexpr int kBytes = 64;
    Mbarrier& barrier = mbarrier(full, stage);
    barrier.arrive(fibers, kBytes * static_cast<int>(slots.size()));
    for (Slot* slot : slots) {
      slot->begin_write(tag, 1);
      fibers.later([slot, &barrier] {
        slot->end_write();
        barrier.complete_bytes(kBytes);
      });
    }
  }
};

/// Base of the warps of all roles.
template <core::Sm90BwdTraits kShape>
struct BwdModelWarp {
  using Barrier = Sm90BwdBarrier;
  using Queue = BwdQueueState;
  BwdModelCta<kShape>& cta;

  static bool has_fault(core::InjectedFault) { return false; }

  template <Sm90BwdBarrier kBarrier, typename State>
  void wait(const State& state) {
    constexpr bool kEmpty = core::sm90_barrier(kShape, kBarrier).empty;
    cta.mbarrier(kBarrier, state.stage())
        .wait(cta.fibers, core::phases_before(kEmpty, state.round()));
  }
  template <Sm90BwdBarrier kBarrier, typename State>
  void arrive(const State& state) {
    cta.mbarrier(kBarrier, state.stage()).arrive(cta.fibers);
  }
  const BwdModelTile& work(BwdQueueState queue) const {
    const BwdModelTile& work = cta.work_tiles[queue.stage()];
    if (work.serial != queue.count) throw Violation{"reads a work tile that is not in its slot"};
    return work;
  }
  /// Of operand `which` of a step.
  Tag tag(BwdQueueState queue, const BwdStep& step, int which) const {
    return {work(queue).serial, 100 * step.tile + 10 * step.head + which};
  }
};

template <core::Sm90BwdTraits kShape>
struct BwdModelScheduler : BwdModelWarp<kShape> {
  std::int32_t first_index() const { return this->cta.cta_index; }
  std::int32_t num_scheduled() const {
    return static_cast<std::int32_t>(this->cta.launch.tiles.size());
  }
  std::int32_t fetch_tile() const {
    const std::int32_t ctas = this->cta.launch.num_ctas;
    this->cta.fibers.may_pause();
    return ctas + static_cast<std::int32_t>(this->cta.launch.tile_counter++);
  }
  bool decode_work_tile(BwdQueueState queue, std::int32_t index) {
    BwdModelTile& work = this->cta.work_tiles[queue.stage()];
    work.serial = -1;
    this->cta.fibers.may_pause();
    static_cast<core::BwdSteps&>(work) = this->cta.launch.tiles[static_cast<std::size_t>(index)];
    work.index = index;
    work.serial = queue.count;
    return true;
  }
  void mark_end(BwdQueueState queue) {
    BwdModelTile& work = this->cta.work_tiles[queue.stage()];
    work.output = core::kBwdQueueEnd;
    work.serial = queue.count;
  }
};

template <core::Sm90BwdTraits kShape>
struct BwdModelProducer : BwdModelWarp<kShape> {
  template <typename Steps>
  void load_a1(BwdQueueState queue) {
    load_a(queue, 0, Sm90BwdBarrier::a1_full);
  }
  template <typename Steps>
  void load_a2(BwdQueueState queue) {
    load_a(queue, 1, Sm90BwdBarrier::a2_full);
  }
  template <typename Steps>
  void load_b1(BwdQueueState queue, typename Steps::State b, const BwdStep& step) {
    this->cta.copy(this->cta.template cells<Steps>(0, b), this->tag(queue, step, 0), Steps::kB1Full,
                   b.stage());
  }
  template <typename Steps>
  void load_b2(BwdQueueState queue, typename Steps::B2State b, const BwdStep& step) {
    this->cta.copy(this->cta.template cells<Steps>(1, {b.count}), this->tag(queue, step, 1),
                   Steps::kB2Full, b.stage());
  }

 private:
  void load_a(BwdQueueState queue, int which, Sm90BwdBarrier full) {
    this->cta.copy(this->cta.a_cells(which), {this->work(queue).serial, 0}, full, 0);
  }
};

template <core::Sm90BwdTraits kShape>
struct BwdModelTail : BwdModelWarp<kShape> {
  Tag read;  // whose rows are in registers

  template <typename Steps>
  void read_rows(BwdQueueState queue, const BwdStep& step) {
    read = this->tag(queue, step, 2);
  }
  template <typename Steps>
  void store_rows(typename Steps::State b) {
    if (!Steps::kOfKeys) return;
    this->cta.rows[b.stage()].write_part(this->cta.fibers, read, 1);
  }
  template <typename Steps>
  bool has_dirty_tail(BwdQueueState queue, const BwdStep& step) const {
    const core::BwdSteps& work = this->work(queue);
    return this->cta.launch.dirty_tail && step.tile == work.first_tile + work.tiles - 1;
  }
  template <typename Steps>
  void zero_tail(BwdQueueState queue, typename Steps::State b, const BwdStep& step) {
    for (int which = Steps::kHasDx ? 0 : 1; which < (Steps::kHasDv ? 2 : 1); ++which) {
      for (const Slot* slot : this->cta.template cells<Steps>(which, b)) {
        slot->check(this->tag(queue, step, which));
      }
    }
  }
};

template <core::Sm90BwdTraits kShape>
struct BwdModelInspector : BwdModelWarp<kShape> {
  void inspect_a1(BwdQueueState queue) { inspect(queue, 0); }
  void inspect_a2(BwdQueueState queue) { inspect(queue, 1); }

 private:
  void inspect(BwdQueueState queue, int which) {
    const std::vector<Slot*> cells = this->cta.a_cells(which);
    for (Slot* slot : cells) slot->begin_read({this->work(queue).serial, 0});
    this->cta.fibers.may_pause();
    for (Slot* slot : cells) slot->end_read();
  }
};

/// A consumer warp. Registers hold tags: the steps of S and dP, and those that the sums contain.
template <core::Sm90BwdTraits kShape, typename Steps>
struct BwdModelConsumer : BwdModelWarp<kShape> {
  using State = typename Steps::State;
  int warp;  // index among the consumer warps of the CTA
  Tag s, dp;
  std::vector<Tag> dv, dx;
  std::deque<std::vector<Slot*>> gemms;  // GEMMs in flight, and the tiles they read
  BwdQueueState queue;
  BwdStep next;  // whose S is issued next
  bool dropped = false;

  int group() const { return warp / 4; }

  template <Sm90BwdBarrier kBarrier, typename State_>
  void arrive(const State_& state) {
    if (this->cta.fault == BwdFault::arrival_missing && kBarrier == Steps::kB1Empty && !dropped) {
      dropped = true;
      return;
    }
    BwdModelWarp<kShape>::template arrive<kBarrier>(state);
  }
  void begin_tile(BwdQueueState queue_) {
    queue = queue_;
    next = {this->work(queue).group_tiles[group()].begin, 0};
    dv.clear();
    dx.clear();
  }
  bool needs_mask(BwdQueueState, std::int32_t) const { return false; }

  void issue_s(State b) {
    s = this->tag(queue, next, 0);
    issue(this->cta.a_cells(0), 0, b, s);
    if (!Steps::kHasDx) next.advance(this->work(queue).heads);
  }
  void issue_dp(State b) {
    dp = this->tag(queue, next, 1);
    issue(this->cta.a_cells(1), 1, b, dp);
    next.advance(this->work(queue).heads);
  }
  void issue_dv(State b, bool accumulate) {
    issue_sum(dv, 1, b, {s.work_tile, s.tile + 1}, accumulate);
  }
  void issue_dx(State b, bool accumulate) { issue_sum(dx, 0, b, s, accumulate); }

  template <int kPending>
  void wgmma_wait() {
    this->cta.fibers.may_pause();
    while (gemms.size() > kPending) {
      for (Slot* slot : gemms.front()) slot->end_read();
      gemms.pop_front();
    }
  }
  void probabilities(BwdQueueState, State b, const BwdStep& step, bool) {
    expect(gemms.size() <= 1, "reads S before its GEMM ends");
    expect(s == this->tag(queue, step, 0), "P of another step");
    check_rows(b, step);
    if (this->cta.fault == BwdFault::released_early) {
      BwdModelWarp<kShape>::template arrive<Steps::kB1Empty>(b);
    }
  }
  void score_gradients(BwdQueueState, State b, const BwdStep& step, bool) {
    expect(gemms.empty(), "reads dP before its GEMM ends");
    expect(!Steps::kHasDx || dp == this->tag(queue, step, 1), "dZ of another step");
    check_rows(b, step);
  }
  void store_tile(BwdQueueState) {
    expect(gemms.empty(), "reads a sum before its GEMM ends");
    const BwdModelTile& work = this->work(queue);
    const core::KeyRange own = work.group_tiles[group()];
    std::vector<Tag> want;
    for (BwdStep step{own.begin, 0}; work.tiles > 0 && step.tile < own.end;
         step.advance(work.heads)) {
      want.push_back(this->tag(queue, step, 0));
    }
    expect(!Steps::kHasDx || dx == want, "stores a sum of other steps");
    for (Tag& tag : want) ++tag.tile;
    expect(!Steps::kHasDv || dv == want, "stores a dV of other steps");
    constexpr int kWarps = BwdModelCta<kShape>::kWarps;
    ++this->cta.launch.written[static_cast<std::size_t>(work.index * kWarps + warp)];
  }

 private:
  void issue(const std::vector<Slot*>& a, int which, State b, const Tag& tag) {
    std::vector<Slot*> slots = this->cta.template cells<Steps>(which, b);
    for (Slot* slot : slots) slot->begin_read(tag);
    for (Slot* slot : a) {
      slot->begin_read({tag.work_tile, 0});
      slots.push_back(slot);
    }
    gemms.push_back(std::move(slots));
    this->cta.fibers.may_pause();
  }
  void issue_sum(std::vector<Tag>& sum, int which, State b, const Tag& tag, bool accumulate) {
    issue({}, which, b, tag);
    if (!accumulate) sum.clear();
    sum.push_back(tag);
  }
  void check_rows(State b, const BwdStep& step) {
    if (Steps::kOfKeys) this->cta.rows[b.stage()].check(this->tag(queue, step, 2));
  }
  static void expect(bool right, const char* text) {
    if (!right) throw Violation{text};
  }
};

template <core::Sm90BwdTraits kShape, typename... Steps>
void consume_bwd_model(BwdModelCta<kShape>& cta, int w, core::BwdPhases<Steps...>) {
  BwdQueueState queue;
  BwdTileState a;
  const auto consume = [&]<typename S>(BwdModelConsumer<kShape, S> warp) {
    core::consume_bwd_tiles<S>(warp, queue, a);
  };
  (consume(BwdModelConsumer<kShape, Steps>{{cta}, w, {}, {}, {}, {}, {}, {}, {}}), ...);
}

/// Runs a launch to its end. Throws Violation.
template <core::Sm90BwdTraits kShape>
void run_bwd_model(BwdLaunch& launch, BwdFault fault, std::uint64_t seed) {
  constexpr int kWarps = BwdModelCta<kShape>::kWarps;
  launch.written.assign(launch.tiles.size() * kWarps, 0);
  Fibers fibers(seed);
  std::deque<BwdModelCta<kShape>> ctas;
  for (std::int32_t i = 0; i < launch.num_ctas; ++i) {
    BwdModelCta<kShape>& cta = ctas.emplace_back(launch, fibers, fault, i);
    const std::string name = "CTA " + std::to_string(i) + " ";
    fibers.add(name + "scheduler", [&cta] {
      BwdModelScheduler<kShape> warp{{cta}};
      core::schedule_tiles(warp);
    });
    fibers.add(name + "producer", [&cta] {
      BwdModelProducer<kShape> warp{{cta}};
      core::produce_bwd(warp, core::BwdPhasesOf<kShape>{});
    });
    fibers.add(name + "tail warp", [&cta] {
      BwdModelTail<kShape> warp{{cta}, {}};
      core::prepare_bwd(warp, core::BwdPhasesOf<kShape>{});
    });
    fibers.add(name + "inspector", [&cta] {
      BwdModelInspector<kShape> warp{{cta}};
      core::inspect_bwd(warp, core::BwdPhasesOf<kShape>{});
    });
    for (int w = 0; w < kWarps; ++w) {
      fibers.add(name + "consumer " + std::to_string(w),
                 [&cta, w] { consume_bwd_model(cta, w, core::BwdPhasesOf<kShape>{}); });
    }
  }
  fibers.run();
  for (const int times : launch.written) {
    if (times != 1) throw Violation{"a warp stores its rows " + std::to_string(times) + " times"};
  }
}

}  // namespace flashcore::protocol
