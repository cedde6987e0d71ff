#include "emulator/machine/races.h"

#include <algorithm>
#include <cstdio>

namespace flashcore::emulator {
namespace {

constexpr int kWordBytes = 4;
/// Copies share this many components of the clocks. Of two copies with the same component, the
/// later one counts as ordered after the earlier one.
constexpr std::uint32_t kCopyAgents = 32;

void join(std::uint32_t* to, const std::uint32_t* from, std::size_t agents) {
  for (std::size_t i = 0; i < agents; ++i) to[i] = std::max(to[i], from[i]);
}

}  // namespace

bool Races::is_ordered(const Access& before, const std::uint32_t* clock) {
  return clock[before.agent] >= before.clock;
}

bool Races::any_ordered(const std::vector<Access>& before, const std::uint32_t* clock) {
  return std::any_of(before.begin(), before.end(),
                     [clock](const Access& access) { return is_ordered(access, clock); });
}

Races::Races(std::uint32_t threads)
    : threads_(threads),
      agents_(threads + kCopyAgents),
      clocks_(static_cast<std::size_t>(threads) * agents_),
      fenced_(threads) {
  for (std::uint32_t thread = 0; thread < threads; ++thread) clock_of(thread)[thread] = 1;
}

void Races::add_memory(const std::uint8_t* first, std::size_t bytes) {
  memories_.push_back({first, std::vector<Word>((bytes + kWordBytes - 1) / kWordBytes)});
}

template <typename F>
void Races::for_words(const std::uint8_t* at, int bytes, F visit) {
  for (Memory& memory : memories_) {
    if (at < memory.first || at >= memory.first + memory.words.size() * kWordBytes) continue;
    const auto offset = static_cast<std::size_t>(at - memory.first);
    const std::size_t end = (offset + static_cast<std::size_t>(bytes) - 1) / kWordBytes;
    for (std::size_t i = offset / kWordBytes; i <= end && i < memory.words.size(); ++i) {
      visit(memory.words[i], memory.first + i * kWordBytes);
    }
    return;
  }
}

void Races::read_word(Word& word, const Access& access, const std::uint32_t* clock,
                      const std::uint8_t* at) {
  if (!word.writes.empty() && !any_ordered(word.writes, clock)) {
    report("read after write", word.writes.front(), access, at);
  }
  // Reads ordered before this one need not be kept: what is ordered after it is ordered after them.
  std::erase_if(word.reads, [&](const Access& read) { return is_ordered(read, clock); });
  word.reads.push_back(access);
}

void Races::change_word(Word& word, const Access& access, const std::uint32_t* clock,
                        const std::uint8_t* at) {
  for (const Access& write : word.writes) {
    if (!is_ordered(write, clock)) report("write after write", write, access, at);
  }
  for (const Access& read : word.reads) {
    if (!is_ordered(read, clock)) report("write after read", read, access, at);
  }
  word.reads.clear();
  word.writes.assign(1, access);
}

void Races::read(Place by, const std::uint8_t* from, int bytes) {
  const std::uint32_t* clock = clock_of(by.thread);
  const Access access{by.thread, clock[by.thread], by.line};
  for_words(from, bytes,
            [&](Word& word, const std::uint8_t* at) { read_word(word, access, clock, at); });
}

void Races::write(Place by, const std::uint8_t* to, const std::uint8_t* value, int bytes) {
  const std::uint32_t* clock = clock_of(by.thread);
  const Access access{by.thread, clock[by.thread], by.line};
  for_words(to, bytes, [&](Word& word, const std::uint8_t* at) {
    // The bytes of the word that are written.
    const std::uint8_t* first = std::max(at, to);
    const std::uint8_t* end = std::min(at + kWordBytes, to + bytes);
    if (!std::equal(first, end, value + (first - to))) return change_word(word, access, clock, at);
    std::erase_if(word.writes, [&](const Access& write) { return is_ordered(write, clock); });
    word.writes.push_back(access);
  });
}

void Races::read_by_async_proxy(Place by, const std::uint8_t* from, int bytes) {
  const std::uint32_t* clock = clock_of(by.thread);
  const Access access{by.thread, clock[by.thread], by.line};
  const auto is_fenced = [&](const Access& write) {
    return write.agent >= threads_ || fenced_[write.agent] >= write.clock;
  };
  for_words(from, bytes, [&](Word& word, const std::uint8_t* at) {
    for (const Access& write : word.writes) {
      if (is_ordered(write, clock) && !is_fenced(write)) {
        report("read by the async proxy after write, without fence.proxy.async between", write,
               access, at);
      }
    }
    read_word(word, access, clock, at);
  });
}

void Races::fence_async_proxy(std::uint32_t thread) {
  fenced_[thread] = clock_of(thread)[thread]++;
}

void Races::sync_warp(std::uint32_t first, std::uint32_t mask) {
  Clock all(agents_);
  for (std::uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    join(all.data(), clock_of(first + static_cast<std::uint32_t>(__builtin_ctz(rest))), agents_);
  }
  for (std::uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const std::uint32_t thread = first + static_cast<std::uint32_t>(__builtin_ctz(rest));
    std::copy(all.begin(), all.end(), clock_of(thread));
    ++clock_of(thread)[thread];
  }
}

void Races::arrive(const void* barrier, std::uint32_t thread) {
  Clock& arrived = barriers_[barrier].arrived;
  arrived.resize(agents_);
  join(arrived.data(), clock_of(thread), agents_);
  ++clock_of(thread)[thread];
}

void Races::arrive(const void* barrier, const Copy& copy) {
  Clock& arrived = barriers_[barrier].arrived;
  arrived.resize(agents_);
  join(arrived.data(), copy.clock.data(), agents_);
}

void Races::complete(const void* barrier) {
  Barrier& found = barriers_[barrier];
  found.completed.swap(found.arrived);
  found.arrived.clear();
}

void Races::wait(const void* barrier, std::uint32_t thread) {
  const Clock& completed = barriers_[barrier].completed;
  if (!completed.empty()) join(clock_of(thread), completed.data(), agents_);
}

Races::Copy Races::start_copy(Place by) {
  std::uint32_t* clock = clock_of(by.thread);
  Copy copy{Clock(clock, clock + agents_), threads_ + copies_ % kCopyAgents, by.line};
  copy.clock[copy.agent] = ++copies_;
  ++clock[by.thread];
  return copy;
}

void Races::write(const Copy& copy, const std::uint8_t* to, int bytes) {
  const Access access{copy.agent, copy.clock[copy.agent], copy.line};
  for_words(to, bytes, [&](Word& word, const std::uint8_t* at) {
    change_word(word, access, copy.clock.data(), at);
  });
}

std::string Races::describe(const Access& access) const {
  return (access.agent < threads_ ? "thread " + std::to_string(access.agent) : "a copy") +
         " at PTX line " + std::to_string(access.line);
}

void Races::report(const char* what, const Access& before, const Access& now,
                   const std::uint8_t* at) {
  if (!found_.empty()) return;
  std::size_t rank = 0;
  while (at < memories_[rank].first ||
         at >= memories_[rank].first + memories_[rank].words.size() * kWordBytes) {
    ++rank;
  }
  char text[160];
  std::snprintf(text, sizeof text, "race: %s, byte %zu of shared memory of CTA %zu of the cluster",
                what, static_cast<std::size_t>(at - memories_[rank].first), rank);
  found_ = std::string(text) + "\n  before: " + describe(before) + "\n  now: " + describe(now);
}

}  // namespace flashcore::emulator
