// A warp: registers, the groups into which its lanes have diverged, and the instructions in flight.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "emulator/machine/address.h"
#include "emulator/machine/memory.h"
#include "emulator/machine/program.h"
#include "emulator/machine/races.h"

namespace flashcore::emulator {

struct Cta;

/// An instruction cannot be executed: the kernel or the emulator is wrong.
struct Fault {
  std::string what;
  int lane = -1;
};

/// A cp.async whose bytes have not yet arrived.
struct PendingCopy {
  std::uint64_t group;
  std::uint8_t* to;
  const std::uint8_t* from;
  std::uint8_t lane, bytes, valid_bytes;
};

/// A wgmma in flight: executed when a wait requires it.
struct PendingMma {
  const Instruction* instruction = nullptr;
  std::uint64_t group = 0;
  std::uint64_t a = 0, b = 0;  // descriptors
  bool accumulate = true, a_mn_major = false, b_mn_major = false;
  std::int32_t first_accumulator = 0;  // identifies a chain on the same registers
  /// The accumulators before this wgmma; empty until an earlier one in flight provides them.
  std::vector<float> accumulators;
};

/// A copy from shared to global memory in flight (cp.async.bulk).
struct PendingStore {
  std::uint64_t group;
  int lane;
  std::function<void()> run;
};

class Warp {
 public:
  enum class Result { progressed, blocked, done };

  Warp(Cta& cta, int index, std::uint32_t lanes);

  /// Executes up to `budget` instructions.
  Result run(int budget);

  // Registers.
  template <typename T>
  const T* in(std::int32_t op) const {
    return reinterpret_cast<const T*>(op >= 0 ? registers_.data() + op : constants_ + ~op);
  }
  template <typename T>
  T* out(std::int32_t op) {
    return reinterpret_cast<T*>(registers_.data() + op);
  }
  /// A value of a lane in a row whose elements have `stride` bytes.
  template <typename T>
  T lane_value(std::int32_t op, int stride, int lane) const {
    T value;
    __builtin_memcpy(&value, in<std::uint8_t>(op) + stride * lane, sizeof value);
    return value;
  }
  std::uint32_t predicate(std::int32_t op) const { return *in<std::uint32_t>(op); }
  void set_predicate(std::int32_t op, std::uint32_t mask, std::uint32_t value) {
    std::uint32_t& row = *out<std::uint32_t>(op);
    row = (row & ~mask) | (value & mask);
  }

  // Memory.
  /// The address operand of a lane, with the displacement.
  std::uint64_t address(const Instruction& i, int op, int lane) const {
    const std::int32_t row = i.ops[op];
    return i.address_bytes == 8 ? in<std::uint64_t>(row)[lane] + i.imm
                                : static_cast<std::uint32_t>(in<std::uint32_t>(row)[lane] + i.imm);
  }
  /// Host address of emulated memory. Checks the bounds and that it is aligned to `align`.
  std::uint8_t* resolve(Space space, std::uint64_t address, int bytes, int align, int lane);

  // Search for races (races.h).
  /// Null if it is off.
  Races* races() const { return races_; }
  /// A lane's thread, counted through the CTAs of the cluster.
  std::uint32_t thread_of(int lane) const;
  Races::Place place_of(int lane) const { return {thread_of(lane), current().line}; }
  void note_read(const std::uint8_t* from, int bytes, int lane) const {
    if (races_ != nullptr) races_->read(place_of(lane), from, bytes);
  }
  /// Before `value` is written.
  void note_write(const std::uint8_t* to, const std::uint8_t* value, int bytes, int lane) const {
    if (races_ != nullptr) races_->write(place_of(lane), to, value, bytes);
  }
  void note_read_by_async_proxy(const std::uint8_t* from, int bytes, int lane) const {
    if (races_ != nullptr) races_->read_by_async_proxy(place_of(lane), from, bytes);
  }

  // Control flow.
  /// Lanes of `mask` go to `target`, the other active ones to the next instruction.
  Step branch(std::uint32_t mask, std::uint32_t target);
  Step exit(std::uint32_t mask);
  /// True if the lanes in `needed` that have not exited all execute this instruction now.
  bool converged(std::uint32_t mask, std::uint32_t needed) const {
    return ((needed & live_) & ~mask) == 0;
  }
  [[noreturn]] void fail(const std::string& what, int lane = -1) const { throw Fault{what, lane}; }

  Cta& cta() { return *cta_; }
  int index() const { return index_; }
  std::uint32_t live() const { return live_; }
  bool done() const { return live_ == 0; }
  /// Where the lanes are, for a report.
  std::string describe() const;
  const Instruction& current() const { return program_->code[pc_]; }

  // Barriers of the CTA: the generation that this warp waits for, plus 1; 0: has not arrived.
  std::uint32_t barrier_wait[16] = {};
  bool cluster_arrived = false;
  std::uint32_t cluster_generation = 0;

  std::deque<PendingCopy> copies;
  std::uint64_t copy_groups[kLanes] = {};  // committed groups of each lane
  std::deque<PendingStore> stores;
  std::uint64_t store_groups[kLanes] = {};
  std::deque<PendingMma> mmas;
  std::uint64_t mma_groups = 0;
  std::uint64_t instructions = 0;  // executed: the clock of the warp

 private:
  struct Group {
    std::uint32_t pc, mask;
    bool blocked;
  };

  void park(std::uint32_t pc, std::uint32_t mask, bool blocked);
  /// Makes the runnable group with the lowest pc current. False if there is none.
  bool pick();
  /// Makes a parked group current. False if it is none.
  bool start_group(std::vector<Group>::iterator group);

  Cta* cta_;
  Races* races_;
  const Program* program_;
  const std::uint8_t* constants_;
  int index_;
  std::uint32_t pc_ = 0, active_ = 0, live_;
  std::uint32_t merge_pc_ = kFullMask;  // at this pc the current lanes meet parked ones
  std::vector<Group> parked_;
  std::vector<std::uint8_t> registers_, local_;
  Range cached_;
  std::uint64_t cached_generation_ = 0;
};

}  // namespace flashcore::emulator
