// Fibers: functions on separate stacks that switch cooperatively. Code that blocks can run in any
// order without threads. A seeded generator picks the next fiber.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "verify/inputs/random.h"

namespace flashcore::protocol {

/// A protocol error in a model.
struct Violation {
  std::string message;
};

class Fibers {
 public:
  explicit Fibers(std::uint64_t seed);
  ~Fibers();
  Fibers(const Fibers&) = delete;
  Fibers& operator=(const Fibers&) = delete;

  /// Adds a fiber that starts in run(). Returns its index, counted from 0.
  int add(std::string name, std::function<void()> body);

  /// Schedules an event at a random later time, outside any fiber: the completion of a copy.
  void later(std::function<void()> event);

  /// Runs all fibers and events to completion. Throws Violation if a fiber threw it or all wait.
  void run();

  // Called by fibers.

  /// Index of the running fiber.
  int current() const { return current_; }
  const std::string& name(int fiber) const;
  /// Yields to other fibers at random.
  void may_pause();
  /// Blocks the fiber until ready() is true. The deadlock report prints `waiting_for`.
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
  std::vector<int> running_;  // those that have not ended
  std::vector<std::function<void()>> events_;
  int current_ = -1;
  bool failed_ = false;
  bool abandoned_ = false;  // fibers that have not ended unwind their stacks
  Violation violation_;
  struct Main;
  std::unique_ptr<Main> main_;
};

}  // namespace flashcore::protocol
