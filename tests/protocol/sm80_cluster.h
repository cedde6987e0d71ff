// Model of a cluster that combines KV splits: the roles of core/sm80_roles.h over modelled buffers,
// one fiber for each warp. A store arrives at a random later time. The model checks the destination
// of every store, and that every slot holds the expected value before a warp reads it.
#pragma once

#include <array>
#include <deque>
#include <string>
#include <vector>

#include "barriers.h"
#include "core/mma_layout.h"
#include "core/sm80_roles.h"
#include "core/sm80_traits.h"

namespace flashcore::protocol {

using core::BufferBarrier;
using core::InjectedFault;

/// A work tile and the CTAs that share its keys.
struct ClusterProblem {
  int rows, splits;
  std::vector<bool> has_tiles;  // for each CTA: some of its keys are visible

  std::string describe() const {
    return std::to_string(rows) + " rows, " + std::to_string(splits) + " CTAs";
  }
};

/// Content of a slot: columns first_column, first_column + stride, ... of a row, or with stride 0
/// its statistics.
struct Sent {
  int split = -1, warp_n = -1, row = -1, first_column = -1, stride = -1;

  bool operator==(const Sent&) const = default;
};

inline std::string to_string(const Sent& sent) {
  if (sent.split < 0) return "nothing";
  return "(split " + std::to_string(sent.split) + ", warp " + std::to_string(sent.warp_n) +
         ", row " + std::to_string(sent.row) +
         (sent.stride == 0 ? ", statistics)"
                           : ", column " + std::to_string(sent.first_column) + ")");
}

/// Barrier of all threads of a cluster, used once.
class ClusterBarrier {
 public:
  explicit ClusterBarrier(int warps) : missing_(warps) {}

  void arrive(Fibers& fibers) {
    fibers.may_pause();
    if (missing_-- == 0)
      throw Violation{name_ + " gets more arrivals than the cluster has threads"};
  }
  void wait(Fibers& fibers) const {
    fibers.wait_until([&] { return missing_ == 0; }, name_);
  }

 private:
  int missing_;
  std::string name_ = "the cluster barrier";
};

/// The buffer of a CTA, in units of 8 bytes.
class ModelBuffer {
 public:
  ModelBuffer(std::string name, int bytes)
      : name_(std::move(name)), units_(static_cast<std::size_t>(bytes / kUnit)) {}

  void init(BufferBarrier barrier, int arrivals) {
    Entry& entry = entry_of(barrier);
    if (entry.state != BarrierState::raw) throw Violation{name_ + ": a barrier is set up twice"};
    entry.barrier = Mbarrier(
        "barrier " + std::to_string(core::mbarrier_index(barrier)) + " of " + name_, arrivals);
    entry.state = BarrierState::initialized;
  }
  void fence() {
    for (Entry& entry : entries_) {
      if (entry.state == BarrierState::initialized) entry.state = BarrierState::fenced;
    }
  }
  /// The cluster barrier publishes fenced mbarriers only.
  void check_fenced() const {
    for (const Entry& entry : entries_) {
      if (entry.state == BarrierState::initialized) {
        throw Violation{name_ + ": a barrier is not fenced"};
      }
    }
  }
  void expect(Fibers& fibers, BufferBarrier barrier, int bytes) {
    if (bytes < 0 || bytes > core::kMaxExpectedBytes) {
      throw Violation{name_ + " expects " + std::to_string(bytes) + " bytes"};
    }
    entry_of(barrier).barrier.arrive(fibers, bytes);
  }
  void wait(Fibers& fibers, BufferBarrier barrier) { entry_of(barrier).barrier.wait(fibers, 1); }

  /// A store by another CTA, which completes bytes on the barrier of this CTA.
  void store(Fibers& fibers, int offset, int bytes, const Sent& sent, BufferBarrier barrier) {
    Entry& entry = entry_of(barrier);
    if (entry.state != BarrierState::fenced) throw Violation{name_ + " is not open yet"};
    if (offset % bytes != 0 || offset < core::ClusterBuffer::kBarrierBytes ||
        offset + bytes > static_cast<int>(units_.size()) * kUnit) {
      throw Violation{name_ + " has no slot at byte " + std::to_string(offset)};
    }
    for (int i = offset; i < offset + bytes; i += kUnit) {
      Unit& unit = units_[static_cast<std::size_t>(i / kUnit)];
      if (unit.claimed) throw Violation{name_ + ": a slot is written twice: " + to_string(sent)};
      unit.claimed = true;
    }
    fibers.later([this, &entry, offset, bytes, sent] {
      if (ended_) throw Violation{"a store arrives after the end of the CTA of " + name_};
      units_[static_cast<std::size_t>(offset / kUnit)].content = sent;
      entry.barrier.complete_bytes(bytes);
    });
  }

  void read(int offset, const Sent& wanted, BufferBarrier barrier) {
    if (!entry_of(barrier).barrier.passed(1)) {
      throw Violation{name_ + " is read before it is full: " + to_string(wanted)};
    }
    Unit& unit = units_[static_cast<std::size_t>(offset / kUnit)];
    if (unit.content != wanted) {
      throw Violation{name_ + " is read for " + to_string(wanted) + ", but holds " +
                      to_string(unit.content)};
    }
    ++unit.reads;
  }

  void end_cta() { ended_ = true; }

  /// Throws unless every received slot was read, outputs exactly once.
  void check_end() const {
    for (const Unit& unit : units_) {
      if (unit.content.split < 0) continue;
      if (unit.content.stride == 0 ? unit.reads == 0 : unit.reads != 1) {
        throw Violation{name_ + ": " + to_string(unit.content) + " is read " +
                        std::to_string(unit.reads) + " times"};
      }
    }
  }

 private:
  static constexpr int kUnit = 8;
  enum class BarrierState { raw, initialized, fenced };
  struct Entry {
    Mbarrier barrier;
    BarrierState state = BarrierState::raw;
  };
  struct Unit {
    bool claimed = false;
    int reads = 0;
    Sent content;  // of the slot that begins here, after its arrival
  };

  Entry& entry_of(BufferBarrier barrier) {
    return entries_[static_cast<std::size_t>(core::mbarrier_index(barrier))];
  }

  std::string name_;
  std::array<Entry, 2> entries_;
  std::vector<Unit> units_;
  bool ended_ = false;
};

/// State that the CTAs of a cluster share.
template <core::Sm80Traits kShape>
struct ModelCluster {
  static constexpr int kWarps = kShape.threads / 32;
  const ClusterProblem& problem;
  Fibers& fibers;
  InjectedFault fault;
  ClusterBarrier barrier;
  std::deque<ModelBuffer> buffers;
  std::vector<int> running;  // running warps of each CTA
  std::vector<int> written;  // number of writes of each output element

  ModelCluster(const ClusterProblem& problem_, Fibers& fibers_, InjectedFault fault_)
      : problem(problem_),
        fibers(fibers_),
        fault(fault_),
        barrier(problem_.splits * kWarps),
        running(static_cast<std::size_t>(problem_.splits), kWarps),
        written(static_cast<std::size_t>(problem_.rows * kShape.head_dim)) {
    for (int rank = 0; rank < problem.splits; ++rank) {
      buffers.emplace_back(
          "buffer " + std::to_string(rank),
          core::ClusterBuffer::bytes(kShape.tile_q, kShape.head_dim, kShape.threads));
    }
  }

  ModelBuffer& buffer(int rank) { return buffers[static_cast<std::size_t>(rank)]; }
  void write(int row, int column) {
    ++written[static_cast<std::size_t>(row * kShape.head_dim + column)];
  }
  void end_warp(int rank) {
    if (--running[static_cast<std::size_t>(rank)] == 0) buffer(rank).end_cta();
  }
  void check_end() const {
    for (const ModelBuffer& buffer : buffers) buffer.check_end();
    for (std::size_t i = 0; i < written.size(); ++i) {
      if (written[i] != 1) {
        throw Violation{"row " + std::to_string(i / kShape.head_dim) + ", column " +
                        std::to_string(i % kShape.head_dim) + ": written " +
                        std::to_string(written[i]) + " times"};
      }
    }
  }
};

/// Base of both kinds of warps.
template <core::Sm80Traits kShape>
struct ModelClusterWarp {
  static constexpr bool kSwapAB = kShape.warp_rows == 8;
  static constexpr int kThreads = kShape.threads;
  static constexpr int kWarpsN = kShape.warps_n();
  static constexpr int kRowVec4s = kShape.head_dim / 4;
  ModelCluster<kShape>& cluster;
  int cta, warp;

  bool has_fault(InjectedFault wanted) const { return cluster.fault == wanted; }
  bool has_first_thread() const { return warp == 0; }
  int index() const { return warp; }
  int rank() const { return cta; }
  int splits() const { return cluster.problem.splits; }
  int rows() const { return cluster.problem.rows; }
  int vec4s() const { return rows() * kRowVec4s; }
  ModelBuffer& buffer() const { return cluster.buffer(cta); }

  template <BufferBarrier kBarrier>
  void init(int arrivals) const {
    cluster.fibers.may_pause();
    buffer().init(kBarrier, arrivals);
  }
  void fence_init() const { buffer().fence(); }
  template <BufferBarrier kBarrier>
  void arrive_expect_tx(int bytes) const {
    buffer().expect(cluster.fibers, kBarrier, bytes);
  }
  template <BufferBarrier kBarrier>
  void wait() const {
    buffer().wait(cluster.fibers, kBarrier);
  }
  void arrive_at_cluster() const {
    if (has_first_thread()) buffer().check_fenced();
    cluster.barrier.arrive(cluster.fibers);
  }
  void wait_for_cluster() const { cluster.barrier.wait(cluster.fibers); }

 protected:
  static int out_at(const core::ClusterBuffer::Layout& layout, int slot) {
    return layout.outputs + slot * core::ClusterBuffer::kOutBytes;
  }
  static int row_stats_at(const core::ClusterBuffer::Layout& layout, int slot) {
    return layout.row_stats + slot * core::ClusterBuffer::kRowStatsBytes;
  }
};

/// A warp of a CTA that sends the results of the whole CTA. The role runs once for all 32 lanes,
/// with the indices of lane 0.
template <core::Sm80Traits kShape>
struct ModelCtaExchangeWarp : ModelClusterWarp<kShape> {
  using Base = ModelClusterWarp<kShape>;
  static constexpr core::ClusterBuffer::Layout kLayout =
      core::ClusterBuffer::layout_of_ctas(kShape.tile_q, kShape.head_dim);
  struct PeerSlot {
    int vec4;
  };
  struct CombinedVec4 {
    int vec4, pass;
  };

  int first_vec4() const { return 32 * this->warp; }
  PeerSlot peer_slot(int vec4) const { return {vec4}; }
  CombinedVec4 combined_in(int pass) const {
    return {core::combined_vec4(pass, this->splits(), this->cta, 0), pass};
  }

  void send_vec4(const PeerSlot& to, int first) const {
    if (to.vec4 != first) throw Violation{"sends a vec4 to the slot of another vec4"};
    this->cluster.fibers.may_pause();
    for (int vec4 = first; vec4 < first + 32 && vec4 < this->vec4s(); ++vec4) {
      const core::ClusterSlot slot = core::peer_slot_of_vec4(vec4, this->splits(), this->cta);
      ModelBuffer& buffer = this->cluster.buffer(slot.rank);
      buffer.store(this->cluster.fibers, Base::out_at(kLayout, slot.index),
                   core::ClusterBuffer::kOutBytes, output(vec4, this->cta), BufferBarrier::vec4s);
      buffer.store(this->cluster.fibers, Base::row_stats_at(kLayout, slot.index),
                   core::ClusterBuffer::kRowStatsBytes, state(vec4, this->cta),
                   BufferBarrier::vec4s);
    }
  }

  void combine_vec4(int pass, const CombinedVec4& combined) const {
    if (combined.pass != pass) throw Violation{"combines vec4s of another pass"};
    this->cluster.fibers.may_pause();
    for (int lane = 0; lane < 32 && combined.vec4 + lane < this->vec4s(); ++lane) {
      const int vec4 = combined.vec4 + lane;
      for (int split = 0; split < this->splits(); ++split) {
        const int slot = core::vec4_slot(pass, this->splits(), split, lane);
        this->buffer().read(Base::out_at(kLayout, slot), output(vec4, split), BufferBarrier::vec4s);
        this->buffer().read(Base::row_stats_at(kLayout, slot), state(vec4, split),
                            BufferBarrier::vec4s);
      }
      for (int i = 0; i < 4; ++i) {
        this->cluster.write(vec4 / Base::kRowVec4s, 4 * (vec4 % Base::kRowVec4s) + i);
      }
    }
  }

 private:
  static Sent output(int vec4, int split) {
    return {split, -1, vec4 / Base::kRowVec4s, 4 * (vec4 % Base::kRowVec4s), 1};
  }
  static Sent state(int vec4, int split) { return {split, -1, vec4 / Base::kRowVec4s, -1, 0}; }
};

/// A warp that sends its own results.
template <core::Sm80Traits kShape>
struct ModelWarpExchangeWarp : ModelClusterWarp<kShape> {
  using Base = ModelClusterWarp<kShape>;
  using Partials = core::WarpPartials<kShape.head_dim, kShape.warps_n()>;
  static constexpr core::ClusterBuffer::Layout kLayout =
      core::ClusterBuffer::layout_of_warps(kShape.tile_q, kShape.head_dim, kShape.warps_n());
  static constexpr int kOctet = 8;

  struct CombinedSlice {
    int row, pass, first;
    bool has_weights = false;
  };

  void send_row_stats() const {
    this->cluster.fibers.may_pause();
    for (int lane = 0; lane < 4; ++lane) {
      for (int half = 0; half < 2; ++half) {
        const int row = core::mma_c(lane, half).column;
        if (row >= this->rows()) continue;
        const core::ClusterSlot slot = peer_slot(row);
        this->cluster.buffer(slot.rank).store(
            this->cluster.fibers, Base::row_stats_at(kLayout, slot.index),
            core::ClusterBuffer::kRowStatsBytes, {this->cta, this->warp, row, -1, 0},
            BufferBarrier::row_stats);
      }
    }
  }

  // A vec4 is four accumulators of V^T P^T of one thread, with a column stride of 8.
  void send_outputs() const {
    for (int lane = 0; lane < 32; ++lane) {
      for (int half = 0; half < 2; ++half) {
        const core::Coordinate c = core::mma_c(lane, half);
        if (c.column >= this->rows()) continue;
        const core::ClusterSlot slot = peer_slot(c.column);
        for (int n = 0; n < kShape.head_dim / 16; n += 2) {
          const int vec4 = slot.index * Partials::kRowVec4s + c.row + n / 2 * kOctet;
          this->cluster.buffer(slot.rank).store(
              this->cluster.fibers, Base::out_at(kLayout, vec4), core::ClusterBuffer::kOutBytes,
              {this->cta, this->warp, c.column, 16 * n + c.row, 8}, BufferBarrier::outputs);
        }
      }
      if (lane % kOctet == 0) this->cluster.fibers.may_pause();
    }
  }

  CombinedSlice combined_in(int pass) const {
    const int first = core::combined_vec4(pass, this->splits(), this->cta, kOctet * this->warp);
    return {first / Partials::kRowVec4s, pass, first};
  }

  // Octet w of the lanes reads the results of warp w of every split.
  void combine_row_stats(CombinedSlice& slice) const {
    this->cluster.fibers.may_pause();
    for (int sender = 0; sender < Base::kWarpsN; ++sender) {
      for (int split = 0; split < this->splits(); ++split) {
        const int partial = Partials::partial_index(slice.pass, this->splits(), split, sender);
        const int slot = partial * Partials::kChunkRows + kOctet * this->warp / Partials::kRowVec4s;
        this->buffer().read(Base::row_stats_at(kLayout, slot), {split, sender, slice.row, -1, 0},
                            BufferBarrier::row_stats);
      }
    }
    slice.has_weights = true;
  }
  void combine_outputs(const CombinedSlice& slice) const {
    if (!slice.has_weights) throw Violation{"combines outputs without their weights"};
    this->cluster.fibers.may_pause();
    const int first_column = 4 * (slice.first % Partials::kRowVec4s);
    for (int lane = 0; lane < 32; ++lane) {
      for (int split = 0; split < this->splits(); ++split) {
        const int partial =
            Partials::partial_index(slice.pass, this->splits(), split, lane / kOctet);
        const int slot =
            partial * core::ClusterBuffer::kChunk + kOctet * this->warp + lane % kOctet;
        this->buffer().read(Base::out_at(kLayout, slot),
                            {split, lane / kOctet, slice.row, first_column + lane % kOctet, 8},
                            BufferBarrier::outputs);
      }
      this->cluster.write(slice.row, first_column + lane);
    }
  }

 private:
  core::ClusterSlot peer_slot(int row) const {
    return Partials::peer_slot_of_row(row, this->splits(), this->cta, this->warp);
  }
};

/// True if warps, not CTAs, send the results of the work tile.
constexpr bool warps_send(const core::Sm80Traits& shape, int rows) {
  return rows <= core::ClusterBuffer::rows_from_warps(shape.tile_q, shape.head_dim);
}

template <core::Sm80Traits kShape>
void run_warp(ModelCluster<kShape>& cluster, int cta, int warp) {
  const bool from_warps = warps_send(kShape, cluster.problem.rows);
  ModelCtaExchangeWarp<kShape> cta_warp{{cluster, cta, warp}};
  core::open_buffer(cta_warp, from_warps);
  cluster.fibers.may_pause();
  if constexpr (ModelClusterWarp<kShape>::kSwapAB) {
    if (from_warps) {
      ModelWarpExchangeWarp<kShape> exchange_warp{{cluster, cta, warp}};
      const bool has_tiles = cluster.problem.has_tiles[static_cast<std::size_t>(cta)];
      if (has_tiles) exchange_warp.send_row_stats();  // after the last softmax
      core::combine_from_warps(exchange_warp, has_tiles);
      cluster.end_warp(cta);
      return;
    }
  }
  core::combine_from_ctas(cta_warp, cta_warp.peer_slot(cta_warp.first_vec4()),
                          cta_warp.combined_in(warp));
  cluster.end_warp(cta);
}

/// Runs a cluster to its end. Throws Violation.
template <core::Sm80Traits kShape>
void run_cluster(const ClusterProblem& problem, InjectedFault fault, std::uint64_t seed) {
  Fibers fibers(seed);
  ModelCluster<kShape> cluster(problem, fibers, fault);
  for (int cta = 0; cta < problem.splits; ++cta) {
    for (int warp = 0; warp < cluster.kWarps; ++warp) {
      fibers.add("CTA " + std::to_string(cta) + " warp " + std::to_string(warp),
                 [&cluster, cta, warp] { run_warp<kShape>(cluster, cta, warp); });
    }
  }
  fibers.run();
  cluster.check_end();
}

}  // namespace flashcore::protocol
