// Model of an sm90 CTA: the roles of core/sm90_roles.h over modelled barriers and tiles, one fiber
// for each warp. The model checks the reads, the writes and the order of the steps.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "barriers.h"
#include "core/sm90_roles.h"
#include "core/step_schedule.h"
#include "sm90_launch.h"

namespace flashcore::protocol {

using core::InjectedFault;
using core::Sm90Barrier;
using core::TileQueueState;

struct ModelTile : core::TileSteps {
  std::int64_t serial = -1;  // number within the CTA
  std::int32_t index = -1;
};

inline std::vector<Slot> make_slots(const char* name, int count) {
  std::vector<Slot> slots;
  for (int i = 0; i < count; ++i) {
    slots.emplace_back(std::string(name) + "[" + std::to_string(i) + "]");
  }
  return slots;
}

/// Shared memory of a CTA.
template <core::Sm90Traits kShape>
struct ModelCta {
  static constexpr int kBoxBytes = 64;

  Launch& launch;
  Fibers& fibers;
  InjectedFault fault;
  std::int32_t cta_index;
  std::vector<Mbarrier> mbarriers;
  std::array<NamedBarrier, 16> named;
  std::array<ModelTile, core::kTileSlots> work_tiles;
  std::vector<std::int64_t> released;  // work tiles released, by each reader
  std::vector<Slot> q = make_slots("Q", kShape.q_stages());
  std::vector<Slot> k = make_slots("K", kShape.stages);
  std::vector<Slot> v = make_slots("V", kShape.stages);
  std::vector<Slot> v_staging = make_slots("staged V", kShape.v_staging_stages());

  /// counted_producers: warps that the barriers expect.
  ModelCta(Launch& launch_, InjectedFault fault_, std::int32_t cta_index_, int counted_producers)
      : launch(launch_), fibers(launch_.fibers()), fault(fault_), cta_index(cta_index_) {
    for (int i = 0; i < core::kSm90Barriers; ++i) {
      const auto barrier = static_cast<Sm90Barrier>(i);
      const core::Sm90BarrierRow row = core::sm90_barrier(kShape, barrier, counted_producers);
      for (int slot = 0; slot < row.slots; ++slot) {
        mbarriers.emplace_back(std::string(row.name) + "[" + std::to_string(slot) + "]",
                               core::initial_arrivals(kShape, barrier, counted_producers,
                                                      fault == InjectedFault::arrivals_too_few));
      }
    }
    for (int group = 0; group < kShape.consumers(); ++group) {
      const auto index = [](core::NamedBarrier id) { return static_cast<std::size_t>(id); };
      named[index(core::ping_pong_barrier(group))] = {
          "ping-pong of warpgroup " + std::to_string(group), core::kPingPongThreads};
      named[index(core::v_tail_barrier(group))] = {"V tail of warpgroup " + std::to_string(group),
                                                   core::kVTailThreads};
    }
    released.resize(
        static_cast<std::size_t>(4 * kShape.consumers() + kShape.transposers() + producers()));
  }

  int producers() const { return launch.problem().producers; }

  Mbarrier& mbarrier(Sm90Barrier barrier, std::uint32_t slot) {
    return mbarriers[static_cast<std::size_t>(core::first_mbarrier(kShape, barrier)) + slot];
  }

  /// A TMA load into a slot, as two boxes that arrive at random later times.
  void copy(Slot& slot, const Tag& tag, Sm90Barrier full, std::uint32_t stage, bool arrives = true,
            int tiles = 1) {
    constexpr int kBoxes = 2;
    Mbarrier& barrier = mbarrier(full, stage);
    if (arrives) barrier.arrive(fibers, kBoxes * kBoxBytes * tiles);
    slot.begin_write(tag, kBoxes);
    for (int box = 0; box < kBoxes; ++box) end_later(slot, barrier);
  }

  /// One producer's boxes of a KV tile of one to four boxes: it may have none.
  void copy_share(Slot& slot, const Tag& tag, Sm90Barrier full, std::uint32_t stage, int rank) {
    Mbarrier& barrier = mbarrier(full, stage);
    barrier.arrive(fibers, std::int64_t{own_boxes(tag, rank)} * kBoxBytes);
    for (int box = 0; box < own_boxes(tag, rank); ++box) {
      fibers.may_pause();
      slot.begin_share(tag, boxes_of(tag));
      end_later(slot, barrier);
    }
  }

  /// The same without a barrier. Returns the number of copies in flight.
  std::shared_ptr<int> gather_share(Slot& slot, const Tag& tag, int rank) {
    const auto in_flight = std::make_shared<int>(own_boxes(tag, rank));
    for (int box = 0; box < own_boxes(tag, rank); ++box) {
      fibers.may_pause();
      slot.begin_share(tag, boxes_of(tag));
      fibers.later([&slot, in_flight] {
        slot.end_write();
        --*in_flight;
      });
    }
    return in_flight;
  }

 private:
  static int boxes_of(const Tag& tag) { return 1 + static_cast<int>(tag.work_tile + tag.tile) % 4; }
  int own_boxes(const Tag& tag, int rank) const {
    return (boxes_of(tag) - rank + producers() - 1) / producers();
  }
  void end_later(Slot& slot, Mbarrier& barrier) {
    fibers.later([&slot, &barrier] {
      slot.end_write();
      barrier.complete_bytes(kBoxBytes);
    });
  }
};

/// Base of the warps of all roles.
template <core::Sm90Traits kShape>
struct ModelWarp {
  using Barrier = Sm90Barrier;
  using Queue = TileQueueState;
  using Pipeline = core::Sm90Pipeline<kShape>;
  ModelCta<kShape>& cta;
  int reader = -1;  // index among the readers of the tile queue; -1 for the scheduler

  bool has_fault(InjectedFault wanted) const { return cta.fault == wanted; }

  template <Sm90Barrier kBarrier, typename State>
  static std::uint32_t phases(const State& state) {
    return core::phases_before(core::sm90_barrier(kShape, kBarrier).empty, state.round());
  }
  template <Sm90Barrier kBarrier, typename State>
  void wait(const State& state) {
    cta.mbarrier(kBarrier, state.stage()).wait(cta.fibers, phases<kBarrier>(state));
  }
  template <Sm90Barrier kBarrier, typename State>
  bool test_wait(const State& state) {
    cta.fibers.may_pause();
    return cta.mbarrier(kBarrier, state.stage()).passed(phases<kBarrier>(state));
  }
  template <Sm90Barrier kBarrier, typename State>
  void arrive(const State& state) {
    cta.mbarrier(kBarrier, state.stage()).arrive(cta.fibers);
    if (kBarrier == Sm90Barrier::tile_empty) ++cta.released[static_cast<std::size_t>(reader)];
  }

  /// The work tile of a queue slot. Throws unless it is in the queue and this warp has not released
  /// it.
  const ModelTile& work(TileQueueState state) const {
    const ModelTile& work = cta.work_tiles[state.stage()];
    if (work.serial != state.count) {
      throw Violation{"reads work tile " + std::to_string(state.count) +
                      ", but its slot has work tile " + std::to_string(work.serial)};
    }
    if (cta.released[static_cast<std::size_t>(reader)] > state.count) {
      throw Violation{"reads work tile " + std::to_string(state.count) + " after releasing it"};
    }
    return work;
  }
};

template <core::Sm90Traits kShape>
struct ModelScheduler : ModelWarp<kShape> {
  std::int32_t first_index() const { return this->cta.cta_index; }
  std::int32_t num_scheduled() const { return this->cta.launch.problem().num_scheduled(); }
  std::int32_t fetch_tile() const { return this->cta.launch.next_index(); }

  bool decode_work_tile(TileQueueState state, std::int32_t index) {
    ModelTile& work = reuse(state);
    work.index = index;
    this->cta.fibers.may_pause();
    const bool has_queries = protocol::decode_work_tile(this->cta.launch.problem(), index, work);
    if (has_queries) work.serial = state.count;
    return has_queries;
  }
  void mark_end(TileQueueState state) {
    ModelTile& work = reuse(state);
    work.queries = -1;
    work.serial = state.count;
  }

 private:
  ModelTile& reuse(TileQueueState state) {
    for (const std::int64_t released : this->cta.released) {
      if (released + core::kTileSlots <= state.count) {
        throw Violation{"a work tile is overwritten before all readers have released it"};
      }
    }
    ModelTile& work = this->cta.work_tiles[state.stage()];
    work.serial = -1;
    return work;
  }
};

/// kGathers: as cuda/sm90/page_gatherer.cuh.
template <core::Sm90Traits kShape, bool kGathers>
struct ModelProducer : ModelWarp<kShape> {
  using Pipeline = typename ModelWarp<kShape>::Pipeline;
  static constexpr bool kDefersArrivals = kGathers;
  int rank;
  struct Deferred {
    Mbarrier* barrier = nullptr;
    std::shared_ptr<int> in_flight;
  } deferred{};  // the tile whose copies are in flight

  bool leads() const { return rank == 0; }
  void finish_loads() {
    if (deferred.barrier == nullptr) return;
    Fibers& fibers = this->cta.fibers;
    fibers.wait_until([&] { return *deferred.in_flight == 0; }, "its copies");
    deferred.barrier->arrive(fibers);
    deferred = {};
  }

  void load_q(TileQueueState state, typename Pipeline::QStage q_stage, int group) {
    for (int i = 0; i < Pipeline::kQTilesPerBarrier; ++i) {
      this->cta.copy(this->cta.q[q_stage.slot() + static_cast<std::uint32_t>(i)],
                     {this->work(state).serial, group + i}, Sm90Barrier::q_full, q_stage.stage(),
                     i == 0, Pipeline::kQTilesPerBarrier);
    }
  }
  void load_k(TileQueueState state, typename Pipeline::KvState keys, std::int32_t tile) {
    load(this->cta.k[keys.stage()], {this->work(state).serial, tile}, Sm90Barrier::k_full,
         keys.stage());
  }
  void load_v(TileQueueState state, typename Pipeline::LoadedVState values, std::int32_t tile) {
    std::vector<Slot>& slots = Pipeline::kFp8 ? this->cta.v_staging : this->cta.v;
    load(slots[values.stage()], {this->work(state).serial, tile}, Pipeline::kLoadedVFull,
         values.stage());
  }

 private:
  void load(Slot& slot, const Tag& tag, Sm90Barrier full, std::uint32_t stage) {
    if constexpr (kGathers) {
      Deferred now{&this->cta.mbarrier(full, stage), this->cta.gather_share(slot, tag, rank)};
      finish_loads();
      deferred = std::move(now);
    } else {
      this->cta.copy_share(slot, tag, full, stage, rank);
    }
  }
};

template <core::Sm90Traits kShape>
struct ModelTransposer : ModelWarp<kShape> {
  using Pipeline = typename ModelWarp<kShape>::Pipeline;

  void transpose(typename Pipeline::LoadedVState staging, typename Pipeline::KvState done,
                 TileQueueState state, std::int32_t tile) {
    const Tag tag{this->work(state).serial, tile};
    this->cta.v_staging[staging.stage()].begin_read(tag);
    this->cta.v[done.stage()].write_part(this->cta.fibers, tag, kShape.transposers());
    this->cta.v_staging[staging.stage()].end_read();
  }
};

/// A 16-bit or fp8 consumer warp. Registers hold tags: the KV tile of S, of P, and the KV tiles
/// whose P V is in O.
template <core::Sm90Traits kShape>
struct ModelConsumer : ModelWarp<kShape> {
  using Pipeline = typename ModelWarp<kShape>::Pipeline;
  using Iterator = core::KvTileIterator<Pipeline>;
  static constexpr core::StepSchedule kSchedule =
      core::schedule_for(kShape.is_fp8(), kShape.head_dim, kShape.tile_q, kShape.tile_k);
  static constexpr bool kPingPong = kSchedule.ping_pong;
  static constexpr bool kRecountsTile = kShape.caps_in_own_kernel();
  static constexpr bool kProbesVEarly = kSchedule.probe_v_early;
  static constexpr bool kQkAhead = kShape.issues_qk_ahead();

  int warp;                            // index among the consumer warps of the CTA
  Tag scores, probabilities, stashed;  // stashed: tag of the row statistics
  std::vector<Tag> output;
  std::deque<std::vector<Slot*>> gemms;  // GEMMs in flight, and the tiles they read

  int group() const { return warp / 4; }

  NamedBarrier& named(core::NamedBarrier id) {
    return this->cta.named[static_cast<std::size_t>(id)];
  }
  void ping_pong_wait() { named(core::ping_pong_barrier(group())).sync(this->cta.fibers); }
  void ping_pong_arrive() {
    named(core::ping_pong_barrier((group() + 1) % Pipeline::kConsumers)).arrive(this->cta.fibers);
  }

  bool needs_mask(const Iterator& it) {
    return !this->work(it.queue).unmasked_tiles[group()].contains(it.tile);
  }

  void issue_qk(typename Pipeline::QStage q_stage, typename Pipeline::KvState keys,
                const Iterator& it) {
    const std::int64_t serial = this->work(it.queue).serial;
    issue({{&this->cta.q[q_stage.slot()], {serial, group()}},
           {&this->cta.k[keys.stage()], {serial, it.tile}}});
    scores = {serial, it.tile};
  }
  template <int kPending>
  void wgmma_wait() {
    this->cta.fibers.may_pause();
    while (gemms.size() > kPending) {
      for (Slot* slot : gemms.front()) slot->end_read();
      gemms.pop_front();
    }
  }
  void fence_acc_s() {}
  void softmax(const Iterator& it, bool) {
    expect(scores == Tag{this->work(it.queue).serial, it.tile},
           "softmax of the scores of another step");
  }
  void pack_p() { probabilities = scores; }

  bool v_tail_dirty() const { return this->cta.launch.problem().dirty_tail; }
  bool has_tail(TileQueueState work, std::int32_t tile) {
    const ModelTile& steps = this->work(work);
    return tile == steps.first_tile + steps.tiles - 1;
  }
  void zero_v_tail(TileQueueState work, std::int32_t tile, typename Pipeline::KvState state) {
    this->cta.v[state.stage()].check({this->work(work).serial, tile});
    named(core::v_tail_barrier(group())).sync(this->cta.fibers);
  }

  void issue_pv(typename Pipeline::KvState state, bool accumulates) {
    issue({{&this->cta.v[state.stage()], probabilities}});
    if (!accumulates) output.clear();
    output.push_back(probabilities);
  }
  void add_pv(typename Pipeline::KvState state, std::int32_t) {
    issue_pv(state, true);
    wgmma_wait<0>();
  }
  void fence_acc_o() { expect(gemms.empty(), "reads an output before its GEMM ends"); }
  bool rescales_any() const { return true; }
  void keep_wait_below() const {}
  void rescale_o() { fence_acc_o(); }

  void begin_tile(TileQueueState) { output.clear(); }
  // The statistics cover the scores up to those of P. The softmax of S adds its own later.
  void stash_row_stats(TileQueueState) { stashed = probabilities; }
  void reset_row_stats() {}

  void store_tile(TileQueueState state) {
    const ModelTile& work = this->work(state);
    const std::int32_t tiles = work.kv_tiles[group()];
    expect(stashed == Tag{work.serial, work.first_tile + tiles - 1},
           "stores row statistics of another tile");
    expect(output.size() == static_cast<std::size_t>(tiles), "stores an output of other KV tiles");
    for (std::int32_t i = 0; i < tiles; ++i) {
      expect(output[static_cast<std::size_t>(i)] == Tag{work.serial, work.first_tile + i},
             "stores an output of other KV tiles");
    }
    this->cta.launch.write(work.index, warp);
  }

 private:
  struct Read {
    Slot* slot;
    Tag tag;
  };
  void issue(std::initializer_list<Read> reads) {
    this->cta.fibers.may_pause();
    std::vector<Slot*> slots;
    for (const Read& read : reads) {
      read.slot->begin_read(read.tag);
      slots.push_back(read.slot);
    }
    gemms.push_back(std::move(slots));
  }
  static void expect(bool right, const char* text) {
    if (!right) throw Violation{text};
  }
};

/// Runs a launch to its end. Throws Violation. uncounted: producers that no barrier expects.
template <core::Sm90Traits kShape>
void run_model(const ModelProblem& problem, InjectedFault fault, std::uint64_t seed,
               int uncounted = 0) {
  Fibers fibers(seed);
  Launch launch(problem, fibers);
  std::deque<ModelCta<kShape>> ctas;
  for (std::int32_t cta_index = 0; cta_index < std::min(problem.num_ctas, problem.num_scheduled());
       ++cta_index) {
    ModelCta<kShape>& cta =
        ctas.emplace_back(launch, fault, cta_index, problem.producers - uncounted);
    const std::string name = "CTA " + std::to_string(cta_index) + " ";
    fibers.add(name + "scheduler", [&cta] {
      ModelScheduler<kShape> warp{{cta}};
      core::schedule_tiles(warp);
    });
    int reader = -1;
    for (int rank = 0; rank < problem.producers; ++rank) {
      ++reader;
      fibers.add(name + "producer " + std::to_string(rank), [&cta, reader, rank] {
        if (cta.launch.problem().gathers) {
          ModelProducer<kShape, true> warp{{cta, reader}, rank};
          core::produce(warp);
        } else {
          ModelProducer<kShape, false> warp{{cta, reader}, rank};
          core::produce(warp);
        }
      });
    }
    for (int i = 0; i < kShape.transposers(); ++i) {
      ++reader;
      fibers.add(name + "transposer " + std::to_string(i), [&cta, reader] {
        if constexpr (kShape.is_fp8()) {
          ModelTransposer<kShape> warp{{cta, reader}};
          core::transpose_v(warp);
        }
      });
    }
    for (int i = 0; i < 4 * kShape.consumers(); ++i) {
      ++reader;
      fibers.add(name + "consumer " + std::to_string(i), [&cta, reader, i] {
        ModelConsumer<kShape> warp{{cta, reader}, i, {}, {}, {}, {}, {}};
        if constexpr (kShape.is_fp8()) {
          core::consume_fp8(warp);
        } else {
          core::consume(warp);
        }
      });
    }
  }
  fibers.run();
  launch.check_end();
}

}  // namespace flashcore::protocol
