// Models of the objects that warps share: mbarriers, named barriers, pipeline slots, wrapping
// counters. Each throws Violation on misuse that the hardware accepts silently.
#pragma once

#include <cstdint>
#include <string>

#include "fibers.h"

namespace flashcore::protocol {

/// Bit of a fiber in an arrival mask. At most 64 fibers, with consecutive indices, share a barrier.
inline std::uint64_t bit_of(int fiber) { return std::uint64_t{1} << (fiber % 64); }

/// mbarrier: a phase completes after all expected arrivals and bytes.
class Mbarrier {
 public:
  Mbarrier() = default;
  Mbarrier(std::string name, int arrivals)
      : name_(std::move(name)), expected_(arrivals), pending_(arrivals) {}

  void arrive(Fibers& fibers, std::int64_t bytes = 0) {
    fibers.may_pause();
    const std::uint64_t bit = bit_of(fibers.current());
    if (pending_ == 0) throw Violation{name_ + " gets more arrivals than its phase expects"};
    if ((arrived_ & bit) != 0) throw Violation{"arrives twice in one phase of " + name_};
    arrived_ |= bit;
    bytes_ += bytes;
    --pending_;
    end_phase();
  }

  void complete_bytes(std::int64_t bytes) {
    bytes_ -= bytes;
    if (bytes_ < 0) throw Violation{name_ + " gets more bytes than were announced"};
    end_phase();
  }

  /// True if `phases` phases are complete. The hardware compares parities only. Throws if that
  /// gives the wrong result.
  bool passed(std::uint32_t phases) const {
    const bool passed = (phases_ ^ phases) % 2 == 0;
    if (passed ? phases_ != phases : phases_ + 1 != phases) {
      throw Violation{"a wait at " + name_ + " for phase " + std::to_string(phases) +
                      " finds phase " + std::to_string(phases_)};
    }
    return passed;
  }

  void wait(Fibers& fibers, std::uint32_t phases) const {
    fibers.wait_until([&] { return passed(phases); }, name_);
  }

  bool is_idle() const { return bytes_ == 0; }
  const std::string& name() const { return name_; }

 private:
  void end_phase() {
    if (pending_ > 0 || bytes_ > 0) return;
    ++phases_;
    pending_ = expected_;
    arrived_ = 0;
  }

  std::string name_;
  int expected_ = 0, pending_ = 0;
  std::int64_t bytes_ = 0;
  std::uint32_t phases_ = 0;
  std::uint64_t arrived_ = 0;  // mask of the fibers that arrived in this phase
};

/// Named barrier: bar.arrive and bar.sync of whole warps.
class NamedBarrier {
 public:
  NamedBarrier() = default;
  NamedBarrier(std::string name, int threads) : name_(std::move(name)), threads_(threads) {}

  void arrive(Fibers& fibers) {
    fibers.may_pause();
    const std::uint64_t bit = bit_of(fibers.current());
    if ((arrived_ & bit) != 0) throw Violation{"arrives twice at " + name_};
    arrived_ |= bit;
    present_ += 32;
    if (present_ < threads_) return;
    present_ = 0;
    arrived_ = 0;
    ++generation_;
  }

  void sync(Fibers& fibers) {
    const std::uint32_t before = generation_;
    arrive(fibers);
    fibers.wait_until([&] { return generation_ != before; }, name_);
  }

 private:
  std::string name_;
  int threads_ = 0, present_ = 0;
  std::uint32_t generation_ = 0;
  std::uint64_t arrived_ = 0;
};

/// Content of a slot: KV tile `tile` of work tile `work_tile`, or the Q tile of warpgroup `tile`.
struct Tag {
  std::int64_t work_tile = -1;
  std::int32_t tile = -1;

  bool operator==(const Tag&) const = default;
};

inline std::string to_string(const Tag& tag) {
  if (tag.work_tile < 0) return "nothing";
  return "(work tile " + std::to_string(tag.work_tile) + ", tile " + std::to_string(tag.tile) + ")";
}

/// A tile in shared memory.
class Slot {
 public:
  Slot() = default;
  explicit Slot(std::string name) : name_(std::move(name)) {}

  void begin_write(const Tag& tag, int writers) {
    if (readers_ > 0) throw Violation{name_ + " is overwritten while it is read"};
    if (writers_ > 0) throw Violation{name_ + " has two writers at a time"};
    writers_ = writers;
    coming_ = tag;
    content_ = {};
  }
  void end_write() {
    if (--writers_ == 0) content_ = coming_;
  }
  /// One of several writers of a tile begins. All of them tell the number of writers.
  void begin_share(const Tag& tag, int writers) {
    if (writers_ == 0) {
      begin_write(tag, writers);
    } else if (coming_ != tag) {
      throw Violation{name_ + " is written for " + to_string(tag) + " and " + to_string(coming_)};
    }
  }
  /// One of several writers of a tile writes its share.
  void write_part(Fibers& fibers, const Tag& tag, int writers) {
    begin_share(tag, writers);
    fibers.may_pause();
    end_write();
  }
  void begin_read(const Tag& tag) {
    check(tag);
    ++readers_;
  }
  void end_read() { --readers_; }
  void check(const Tag& tag) const {
    if (content_ != tag) {
      throw Violation{name_ + " is read for " + to_string(tag) + ", but holds " +
                      to_string(content_) +
                      (writers_ > 0 ? " and waits for " + to_string(coming_) : "")};
    }
  }

 private:
  std::string name_;
  Tag content_, coming_;
  int readers_ = 0, writers_ = 0;
};

/// atomicInc: counts up to `last`, wraps to 0, returns the old count.
inline std::uint32_t count_and_wrap(std::uint32_t& counter, std::uint32_t last) {
  const std::uint32_t before = counter;
  counter = before >= last ? 0 : before + 1;
  return before;
}

}  // namespace flashcore::protocol
