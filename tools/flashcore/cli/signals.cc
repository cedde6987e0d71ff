#include "cli/signals.h"
#include "cli/text.h"

#include <signal.h>

#include <atomic>

namespace flashcore::tool {
namespace {

std::atomic<int> g_signal{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler needs a lock-free atomic");

void note(int signal) { g_signal.store(signal); }

double g_earlier_s = 0;

}  // namespace

void note_interrupts() {
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

int noted_signal() { return g_signal.load(); }
void note_signal(int number) { note(number); }
void count_earlier_time(double seconds) { g_earlier_s = seconds; }

Stop::Stop(double limit_s) : limit_s_(limit_s), start_(std::chrono::steady_clock::now()) {}

double Stop::elapsed_s() const {
  const std::chrono::duration<double> here = std::chrono::steady_clock::now() - start_;
  return g_earlier_s + here.count();
}

bool Stop::expired() const { return limit_s_ > 0 && elapsed_s() >= limit_s_; }

bool Stop::now() const { return g_signal.load() != 0 || expired(); }

std::string Stop::reason() const {
  if (g_signal.load() != 0) return "interrupted";
  if (expired()) return formatted("the time limit of {:g} s was reached", limit_s_);
  return {};
}

int exit_code_after_interrupt(int code) {
  const int signal = g_signal.load();
  return signal == 0 ? code : 128 + signal;
}

}  // namespace flashcore::tool
