// Finds races in the shared memory of a cluster: two accesses, one of them a write, that no barrier
// orders. Writes of the value that a word already has are no race with one another. Every thread
// has a vector clock. A release adds it to a barrier's clock, an acquire adds the barrier's clock
// to it, and an access is ordered if the clock contains the one before it (Flanagan and Freund,
// FastTrack). The result hardly depends on the order in which warps run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace flashcore::emulator {

class Races {
 public:
  using Clock = std::vector<std::uint32_t>;

  /// A thread at an instruction.
  struct Place {
    std::uint32_t thread;
    std::int32_t line;
  };
  /// A copy in flight: what its issuer has seen, and a component of its own.
  struct Copy {
    Clock clock;
    std::uint32_t agent = 0;
    std::int32_t line = 0;
  };

  explicit Races(std::uint32_t threads);
  /// Shared memory of a CTA.
  void add_memory(const std::uint8_t* first, std::size_t bytes);

  /// Accesses outside the shared memory of the cluster are ignored.
  void read(Place by, const std::uint8_t* from, int bytes);
  /// Called before the bytes of `value` are written.
  void write(Place by, const std::uint8_t* to, const std::uint8_t* value, int bytes);
  /// A read by wgmma or a bulk copy: ordinary writes before it need a fence.proxy.async.
  void read_by_async_proxy(Place by, const std::uint8_t* from, int bytes);
  void fence_async_proxy(std::uint32_t thread);

  /// The threads of `mask`, counted from `first`, meet.
  void sync_warp(std::uint32_t first, std::uint32_t mask);

  // A barrier is identified by its address. wait() acquires what arrived in its last complete
  // phase.
  void init(const void* barrier) { barriers_[barrier] = {}; }
  void arrive(const void* barrier, std::uint32_t thread);
  void arrive(const void* barrier, const Copy& copy);
  void complete(const void* barrier);
  void wait(const void* barrier, std::uint32_t thread);

  Copy start_copy(Place by);
  /// A copy changes all words.
  void write(const Copy& copy, const std::uint8_t* to, int bytes);

  /// The first race, or an empty string.
  const std::string& found() const { return found_; }

 private:
  struct Access {
    std::uint32_t agent = 0, clock = 0;
    std::int32_t line = 0;
  };
  /// 4 bytes. Threads that write different bytes of a word are taken for a race.
  struct Word {
    std::vector<Access> writes;  // the last one that changed it, and later ones of the same value
    std::vector<Access> reads;   // since it changed
  };
  struct Memory {
    const std::uint8_t* first;
    std::vector<Word> words;
  };
  struct Barrier {
    Clock arrived, completed;
  };

  static bool is_ordered(const Access& before, const std::uint32_t* clock);
  static bool any_ordered(const std::vector<Access>& before, const std::uint32_t* clock);
  template <typename F>
  void for_words(const std::uint8_t* at, int bytes, F visit);
  std::uint32_t* clock_of(std::uint32_t thread) {
    return &clocks_[static_cast<std::size_t>(thread) * agents_];
  }
  void read_word(Word& word, const Access& access, const std::uint32_t* clock,
                 const std::uint8_t* at);
  void change_word(Word& word, const Access& access, const std::uint32_t* clock,
                   const std::uint8_t* at);
  void report(const char* what, const Access& before, const Access& now, const std::uint8_t* at);
  std::string describe(const Access& access) const;

  std::uint32_t threads_, agents_;  // agents: threads, then copies
  std::vector<std::uint32_t> clocks_, fenced_;
  std::uint32_t copies_ = 0;
  std::vector<Memory> memories_;
  std::unordered_map<const void*, Barrier> barriers_;
  std::string found_;
};

}  // namespace flashcore::emulator
