// Fibers: functions that run in turns on stacks of their own, so that code which waits can be run
// in any order without threads. Who runs next is drawn from a seed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "verify/inputs/random.h"

namespace flashcore::protocol {

/// What went wrong in a model, in words.
struct Violation {
  std::string words;
};

class Fibers {
 public:
  explicit Fibers(std::uint64_t seed);
  ~Fibers();
  Fibers(const Fibers&) = delete;
  Fibers& operator=(const Fibers&) = delete;

  /// A fiber that begins when run() is called. Its number counts from 0.
  int add(std::string name, std::function<void()> body);

  /// Something that happens at any later time, in no fiber: a copy that arrives.
  void later(std::function<void()> event);

  /// Runs everything to its end. Throws Violation where a fiber did, or where all wait.
  void run();

  // For fibers.

  /// The number of the fiber that runs now.
  int current() const { return current_; }
  const std::string& name(int fiber) const;
  /// Lets others run, now and then.
  void may_pause();
  /// Lets others run until ready() holds. waiting_for: for the report of a deadlock.
  void wait_until(const std::function<bool()>& ready, const std::string& waiting_for);

 private:
  struct Fiber;

  void step();
  void switch_to(Fiber& fiber);
  void switch_back();
  static void enter(unsigned high, unsigned low);
  std::string deadlock() const;

  verify::Random random_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<std::function<void()>> events_;
  int current_ = -1, running_ = 0;
  bool failed_ = false;
  Violation violation_;
  struct Main;
  std::unique_ptr<Main> main_;
};

}  // namespace flashcore::protocol
