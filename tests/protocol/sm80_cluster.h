// CTAs of a cluster that join split KV, as a model: the roles of core/sm80_roles.h, one fiber for
// each warp, over modelled inboxes. A store arrives at any later time. Warps check where they send,
// and that what they read is there and is what they take it for.
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

/// An item and the CTAs that share its keys.
struct ClusterProblem {
  int rows, splits;
  std::vector<bool> has_steps;  // of each CTA: some of its keys are seen

  std::string words() const {
    return std::to_string(rows) + " rows, " + std::to_string(splits) + " CTAs";
  }
};

/// What a slot of the inbox holds: columns first, first + stride, ... of a row, or with stride 0
/// its state.
struct Sent {
  int split = -1, warp_n = -1, row = -1, first_column = -1, stride = -1;

  bool operator==(const Sent&) const = default;
};

inline std::string to_string(const Sent& sent) {
  if (sent.split < 0) return "nothing";
  return "(split " + std::to_string(sent.split) + ", warp " + std::to_string(sent.warp_n) +
         ", row " + std::to_string(sent.row) +
         (sent.stride == 0 ? ", state)" : ", column " + std::to_string(sent.first_column) + ")");
}

/// All threads of a cluster meet once.
class ClusterBarrier {
 public:
  explicit ClusterBarrier(int warps) : missing_(warps) {}

  void arrive(Fibers& fibers) {
    fibers.may_pause();
    if (missing_-- == 0) throw Violation{name_ + " gets more arrivals than there are threads"};
  }
  void wait(Fibers& fibers) const {
    fibers.wait_until([&] { return missing_ == 0; }, name_);
  }

 private:
  int missing_;
  std::string name_ = "the cluster barrier";
};

/// The inbox of a CTA, in units of 8 bytes.
class ModelInbox {
 public:
  ModelInbox(std::string name, int bytes)
      : name_(std::move(name)), units_(static_cast<std::size_t>(bytes / kUnit)) {}

  void init(BufferBarrier barrier, int arrivals) {
    Entry& entry = entry_of(barrier);
    if (entry.state != BarrierState::raw) throw Violation{name_ + ": a barrier is set up twice"};
    entry.barrier = Mbarrier(
        "barrier " + std::to_string(core::mbarrier_index(barrier)) + " of " + name_, arrivals);
    entry.state = BarrierState::initialised;
  }
  void fence() {
    for (Entry& entry : entries_) {
      if (entry.state == BarrierState::initialised) entry.state = BarrierState::fenced;
    }
  }
  /// The cluster barrier makes fenced barriers known to others, and no more.
  void check_fenced() const {
    for (const Entry& entry : entries_) {
      if (entry.state == BarrierState::initialised) {
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

  /// A store by another CTA, which counts towards a barrier of this one.
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

  /// All that came was used: outputs once.
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
  enum class BarrierState { raw, initialised, fenced };
  struct Entry {
    Mbarrier barrier;
    BarrierState state = BarrierState::raw;
  };
  struct Unit {
    bool claimed = false;
    int reads = 0;
    Sent content;  // of the slot that begins here, once it has come
  };

  Entry& entry_of(BufferBarrier barrier) {
    return entries_[static_cast<std::size_t>(core::mbarrier_index(barrier))];
  }

  std::string name_;
  std::array<Entry, 2> entries_;
  std::vector<Unit> units_;
  bool ended_ = false;
};

/// What the CTAs of a cluster share.
template <core::Sm80Traits kShape>
struct ModelCluster {
  static constexpr int kWarps = kShape.threads / 32;
  const ClusterProblem& problem;
  Fibers& fibers;
  InjectedFault fault;
  ClusterBarrier barrier;
  std::deque<ModelInbox> inboxes;
  std::vector<int> running;  // warps of each CTA
  std::vector<int> written;  // times, of each element of the output

  ModelCluster(const ClusterProblem& problem_, Fibers& fibers_, InjectedFault fault_)
      : problem(problem_),
        fibers(fibers_),
        fault(fault_),
        barrier(problem_.splits * kWarps),
        running(static_cast<std::size_t>(problem_.splits), kWarps),
        written(static_cast<std::size_t>(problem_.rows * kShape.head_dim)) {
    for (int rank = 0; rank < problem.splits; ++rank) {
      inboxes.emplace_back(
          "inbox " + std::to_string(rank),
          core::ClusterBuffer::bytes(kShape.tile_q, kShape.head_dim, kShape.threads));
    }
  }

  ModelInbox& inbox(int rank) { return inboxes[static_cast<std::size_t>(rank)]; }
  void write(int row, int column) {
    ++written[static_cast<std::size_t>(row * kShape.head_dim + column)];
  }
  void end_warp(int rank) {
    if (--running[static_cast<std::size_t>(rank)] == 0) inbox(rank).end_cta();
  }
  void check_end() const {
    for (const ModelInbox& inbox : inboxes) inbox.check_end();
    for (std::size_t i = 0; i < written.size(); ++i) {
      if (written[i] != 1) {
        throw Violation{"row " + std::to_string(i / kShape.head_dim) + ", column " +
                        std::to_string(i % kShape.head_dim) + ": written " +
                        std::to_string(written[i]) + " times"};
      }
    }
  }
};

/// What warps of both kinds have.
template <core::Sm80Traits kShape>
struct ModelClusterWarp {
  static constexpr bool kSwapAB = kShape.warp_rows == 8;
  static constexpr int kThreads = kShape.threads;
  static constexpr int kWarpsN = kShape.warps_n();
  static constexpr int kRowPieces = kShape.head_dim / 4;
  ModelCluster<kShape>& cluster;
  int cta, warp;

  bool has_fault(InjectedFault bug) const { return cluster.fault == bug; }
  bool has_first_thread() const { return warp == 0; }
  int index() const { return warp; }
  int rank() const { return cta; }
  int splits() const { return cluster.problem.splits; }
  int rows() const { return cluster.problem.rows; }
  int pieces() const { return rows() * kRowPieces; }
  ModelInbox& inbox() const { return cluster.inbox(cta); }

  template <BufferBarrier kBarrier>
  void init(int arrivals) const {
    cluster.fibers.may_pause();
    inbox().init(kBarrier, arrivals);
  }
  void fence_init() const { inbox().fence(); }
  template <BufferBarrier kBarrier>
  void arrive_expect_tx(int bytes) const {
    inbox().expect(cluster.fibers, kBarrier, bytes);
  }
  template <BufferBarrier kBarrier>
  void wait() const {
    inbox().wait(cluster.fibers, kBarrier);
  }
  void arrive_at_cluster() const {
    if (has_first_thread()) inbox().check_fenced();
    cluster.barrier.arrive(cluster.fibers);
  }
  void wait_for_cluster() const { cluster.barrier.wait(cluster.fibers); }

 protected:
  static int out_at(const core::ClusterBuffer::Layout& layout, int slot) {
    return layout.outputs + slot * core::ClusterBuffer::kOutBytes;
  }
  static int state_at(const core::ClusterBuffer::Layout& layout, int slot) {
    return layout.states + slot * core::ClusterBuffer::kStateBytes;
  }
};

/// A warp of CTAs that send pieces. The role runs once for its 32 lanes, with lane 0's numbers.
template <core::Sm80Traits kShape>
struct ModelPieceWarp : ModelClusterWarp<kShape> {
  using Base = ModelClusterWarp<kShape>;
  static constexpr core::ClusterBuffer::Layout kLayout =
      core::ClusterBuffer::layout_of_ctas(kShape.tile_q, kShape.head_dim);
  struct PeerSlot {
    int piece;
  };
  struct Joined {
    int piece, turn;
  };

  int first_piece() const { return 32 * this->warp; }
  PeerSlot recipient(int piece) const { return {piece}; }
  Joined joined_in(int turn) const {
    return {core::combined_piece(turn, this->splits(), this->cta, 0), turn};
  }

  void send_piece(const PeerSlot& to, int first) const {
    if (to.piece != first) throw Violation{"sends a piece to another piece's recipient"};
    this->cluster.fibers.may_pause();
    for (int piece = first; piece < first + 32 && piece < this->pieces(); ++piece) {
      const core::ClusterSlot slot = core::recipient_of_piece(piece, this->splits(), this->cta);
      ModelInbox& inbox = this->cluster.inbox(slot.rank);
      inbox.store(this->cluster.fibers, Base::out_at(kLayout, slot.index),
                  core::ClusterBuffer::kOutBytes, output(piece, this->cta), BufferBarrier::pieces);
      inbox.store(this->cluster.fibers, Base::state_at(kLayout, slot.index),
                  core::ClusterBuffer::kStateBytes, state(piece, this->cta), BufferBarrier::pieces);
    }
  }

  void combine_piece(int turn, const Joined& joined) const {
    if (joined.turn != turn) throw Violation{"joins pieces of another turn"};
    this->cluster.fibers.may_pause();
    for (int lane = 0; lane < 32 && joined.piece + lane < this->pieces(); ++lane) {
      const int piece = joined.piece + lane;
      for (int split = 0; split < this->splits(); ++split) {
        const int slot = core::piece_slot(turn, this->splits(), split, lane);
        this->inbox().read(Base::out_at(kLayout, slot), output(piece, split),
                           BufferBarrier::pieces);
        this->inbox().read(Base::state_at(kLayout, slot), state(piece, split),
                           BufferBarrier::pieces);
      }
      for (int i = 0; i < 4; ++i) {
        this->cluster.write(piece / Base::kRowPieces, 4 * (piece % Base::kRowPieces) + i);
      }
    }
  }

 private:
  static Sent output(int piece, int split) {
    return {split, -1, piece / Base::kRowPieces, 4 * (piece % Base::kRowPieces), 1};
  }
  static Sent state(int piece, int split) { return {split, -1, piece / Base::kRowPieces, -1, 0}; }
};

/// A warp that sends its own results.
template <core::Sm80Traits kShape>
struct ModelPartWarp : ModelClusterWarp<kShape> {
  using Base = ModelClusterWarp<kShape>;
  using Parts = core::WarpParts<kShape.head_dim, kShape.warps_n()>;
  static constexpr core::ClusterBuffer::Layout kLayout =
      core::ClusterBuffer::layout_of_warps(kShape.tile_q, kShape.head_dim, kShape.warps_n());
  static constexpr int kOctet = 8;

  struct Turn {
    int row, turn, first;
    bool has_states = false;
  };

  void send_row_stats() const {
    this->cluster.fibers.may_pause();
    for (int lane = 0; lane < 4; ++lane) {
      for (int half = 0; half < 2; ++half) {
        const int row = core::mma_c(lane, half).column;
        if (row >= this->rows()) continue;
        const core::ClusterSlot slot = recipient(row);
        this->cluster.inbox(slot.rank).store(
            this->cluster.fibers, Base::state_at(kLayout, slot.index),
            core::ClusterBuffer::kStateBytes, {this->cta, this->warp, row, -1, 0},
            BufferBarrier::states);
      }
    }
  }

  // A thread's four columns of two accumulator tiles of V^T P^T, which lie 8 apart.
  void send_outputs() const {
    for (int lane = 0; lane < 32; ++lane) {
      for (int half = 0; half < 2; ++half) {
        const core::Coordinate c = core::mma_c(lane, half);
        if (c.column >= this->rows()) continue;
        const core::ClusterSlot slot = recipient(c.column);
        for (int n = 0; n < kShape.head_dim / 16; n += 2) {
          const int piece = slot.index * Parts::kRowPieces + c.row + n / 2 * kOctet;
          this->cluster.inbox(slot.rank).store(
              this->cluster.fibers, Base::out_at(kLayout, piece), core::ClusterBuffer::kOutBytes,
              {this->cta, this->warp, c.column, 16 * n + c.row, 8}, BufferBarrier::outputs);
        }
      }
      if (lane % kOctet == 0) this->cluster.fibers.may_pause();
    }
  }

  Turn turn(int turn) const {
    const int first = core::combined_piece(turn, this->splits(), this->cta, kOctet * this->warp);
    return {first / Parts::kRowPieces, turn, first};
  }

  // Octet w of a warp's lanes reads what the warps w of all splits have sent.
  void combine_row_stats(Turn& joined) const {
    this->cluster.fibers.may_pause();
    for (int sender = 0; sender < Base::kWarpsN; ++sender) {
      for (int split = 0; split < this->splits(); ++split) {
        const int part = Parts::part(joined.turn, this->splits(), split, sender);
        const int slot = part * Parts::kChunkRows + kOctet * this->warp / Parts::kRowPieces;
        this->inbox().read(Base::state_at(kLayout, slot), {split, sender, joined.row, -1, 0},
                           BufferBarrier::states);
      }
    }
    joined.has_states = true;
  }
  void combine_outputs(const Turn& joined) const {
    if (!joined.has_states) throw Violation{"joins outputs without their weights"};
    this->cluster.fibers.may_pause();
    const int first_column = 4 * (joined.first % Parts::kRowPieces);
    for (int lane = 0; lane < 32; ++lane) {
      for (int split = 0; split < this->splits(); ++split) {
        const int part = Parts::part(joined.turn, this->splits(), split, lane / kOctet);
        const int slot = part * core::ClusterBuffer::kChunk + kOctet * this->warp + lane % kOctet;
        this->inbox().read(Base::out_at(kLayout, slot),
                           {split, lane / kOctet, joined.row, first_column + lane % kOctet, 8},
                           BufferBarrier::outputs);
      }
      this->cluster.write(joined.row, first_column + lane);
    }
  }

 private:
  core::ClusterSlot recipient(int row) const {
    return Parts::recipient_of_row(row, this->splits(), this->cta, this->warp);
  }
};

/// Whether warps send the item's results themselves.
constexpr bool warps_send(const core::Sm80Traits& shape, int rows) {
  return rows <= core::ClusterBuffer::rows_from_warps(shape.tile_q, shape.head_dim);
}

template <core::Sm80Traits kShape>
void run_warp(ModelCluster<kShape>& cluster, int cta, int warp) {
  const bool by_warps = warps_send(kShape, cluster.problem.rows);
  ModelPieceWarp<kShape> piece_warp{{cluster, cta, warp}};
  core::open_buffer(piece_warp, by_warps);
  cluster.fibers.may_pause();
  if constexpr (ModelClusterWarp<kShape>::kSwapAB) {
    if (by_warps) {
      ModelPartWarp<kShape> part_warp{{cluster, cta, warp}};
      const bool has_steps = cluster.problem.has_steps[static_cast<std::size_t>(cta)];
      if (has_steps) part_warp.send_row_stats();  // with the last scores
      core::combine_from_warps(part_warp, has_steps);
      cluster.end_warp(cta);
      return;
    }
  }
  core::combine_from_ctas(piece_warp, piece_warp.recipient(piece_warp.first_piece()),
                          piece_warp.joined_in(warp));
  cluster.end_warp(cta);
}

/// Runs a cluster to its end; throws Violation.
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
