// Case count of a fuzz test: a fixed number with a fixed seed, or a time limit.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "support/rounds.h"

namespace flashcore::test {

/// Runs `rounds(count)` cases of seed `fixed_seed`. If FLASHCORE_FUZZ_SECONDS is set, runs cases
/// for `share` of that time instead. Their seed is FLASHCORE_FUZZ_SEED or the clock, and is
/// printed.
///
///   for (FuzzCases cases(1000, 0.5, kSeed); cases.next();) run(cases.seed(), cases.number());
class FuzzCases {
 public:
  using Clock = std::chrono::steady_clock;

  FuzzCases(int count, double share, std::uint64_t fixed_seed)
      : count_(rounds(count)), seed_(fixed_seed) {
    const char* seconds = std::getenv("FLASHCORE_FUZZ_SECONDS");
    if (seconds == nullptr) return;
    timed_ = true;
    end_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                              std::chrono::duration<double>(share * std::atof(seconds)));
    const char* seed = std::getenv("FLASHCORE_FUZZ_SEED");
    seed_ = seed != nullptr ? std::strtoull(seed, nullptr, 10)
                            : static_cast<std::uint64_t>(std::time(nullptr));
    std::printf("FLASHCORE_FUZZ_SEED=%llu\n", static_cast<unsigned long long>(seed_));
    std::fflush(stdout);  // a case may crash the program
  }
  FuzzCases(const FuzzCases&) = delete;
  FuzzCases& operator=(const FuzzCases&) = delete;
  ~FuzzCases() {
    if (timed_) std::printf("%d cases\n", done());
  }

  bool next() {
    if (timed_ ? Clock::now() >= end_ : number_ + 1 >= count_) return false;
    ++number_;
    return true;
  }
  int number() const { return number_; }
  int done() const { return number_ + 1; }
  std::uint64_t seed() const { return seed_; }

 private:
  int count_, number_ = -1;
  bool timed_ = false;
  std::uint64_t seed_;
  Clock::time_point end_;
};

}  // namespace flashcore::test
