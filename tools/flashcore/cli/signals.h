// When to stop early: Ctrl-C, SIGTERM or a time limit. Loops ask between two pieces of work, so
// that what was done so far can still be printed.
#pragma once

#include <chrono>
#include <string>

namespace flashcore::tool {

/// From now on the first SIGINT or SIGTERM is only noted; a second one ends the process as usual.
void note_interrupts();

/// The signal that came, 0: none. note_signal() is for one that came to another process.
int noted_signal();
void note_signal(int number);

/// This process goes on with what began so many seconds before it.
void begun_before(double seconds);

class Stop {
 public:
  /// limit_s <= 0: no limit.
  explicit Stop(double limit_s);

  bool now() const;
  /// "interrupted", "the time limit of 10 s was reached", or nothing.
  std::string reason() const;
  double elapsed_s() const;

 private:
  bool expired() const;

  double limit_s_;
  std::chrono::steady_clock::time_point start_;
};

/// `code`, or 128 + the signal's number where one came: 130 for Ctrl-C.
int exit_code_after_interrupt(int code);

}  // namespace flashcore::tool
