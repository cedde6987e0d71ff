// Early stop by Ctrl-C, SIGTERM or a time limit. Loops poll between two problems, so that they can
// still print the results so far.
#pragma once

#include <chrono>
#include <string>

namespace flashcore::tool {

/// From now on the first SIGINT or SIGTERM is only noted. A second one ends the process.
void note_interrupts();

/// The signal received so far; 0: none. note_signal() is for one that another process received.
int noted_signal();
void note_signal(int number);

/// Adds the time of the earlier processes of this run to Stop::elapsed_s().
void count_earlier_time(double seconds);

class Stop {
 public:
  /// limit_s <= 0: no limit.
  explicit Stop(double limit_s);

  bool now() const;
  /// "interrupted" or "the time limit of 10 s was reached"; empty: neither.
  std::string reason() const;
  double elapsed_s() const;

 private:
  bool expired() const;

  double limit_s_;
  std::chrono::steady_clock::time_point start_;
};

/// Returns `code`, or 128 + the signal number after a signal: 130 for Ctrl-C.
int exit_code_after_interrupt(int code);

}  // namespace flashcore::tool
