#include "fibers.h"

#include <ucontext.h>

#include <utility>

namespace flashcore::protocol {
namespace {

constexpr std::size_t kStackBytes = 128 * 1024;
constexpr std::int64_t kPauseOneIn = 3;  // one in this many calls of may_pause() pauses

/// Stacks for the next Fibers object. New stacks cost page faults.
std::vector<std::unique_ptr<char[]>>& free_stacks() {
  static std::vector<std::unique_ptr<char[]>> stacks;
  return stacks;
}

std::unique_ptr<char[]> take_stack() {
  auto& stacks = free_stacks();
  if (stacks.empty()) return std::unique_ptr<char[]>(new char[kStackBytes]);
  std::unique_ptr<char[]> stack = std::move(stacks.back());
  stacks.pop_back();
  return stack;
}

}  // namespace

struct Fibers::Fiber {
  std::string name;
  std::function<void()> body;
  std::unique_ptr<char[]> stack = take_stack();
  ucontext_t context{};
  const std::function<bool()>* ready = nullptr;  // null: not waiting
  const std::string* waiting_for = nullptr;
  bool begun = false, ended = false;
};

struct Fibers::Main {
  ucontext_t context{};
};

Fibers::Fibers(std::uint64_t seed) : random_(seed), main_(std::make_unique<Main>()) {}

Fibers::~Fibers() {
  for (const auto& fiber : fibers_) free_stacks().push_back(std::move(fiber->stack));
}

int Fibers::add(std::string name, std::function<void()> body) {
  fibers_.push_back(std::make_unique<Fiber>());
  fibers_.back()->name = std::move(name);
  fibers_.back()->body = std::move(body);
  ++running_;
  return static_cast<int>(fibers_.size()) - 1;
}

void Fibers::later(std::function<void()> event) { events_.push_back(std::move(event)); }

const std::string& Fibers::name(int fiber) const {
  return fibers_[static_cast<std::size_t>(fiber)]->name;
}

void Fibers::enter(unsigned high, unsigned low) {
  auto* self = reinterpret_cast<Fibers*>((static_cast<std::uintptr_t>(high) << 32) | low);
  Fiber& fiber = *self->fibers_[static_cast<std::size_t>(self->current_)];
  try {
    fiber.body();
  } catch (const Violation& violation) {
    self->failed_ = true;
    self->violation_ = {fiber.name + ": " + violation.message};
  }
  fiber.ended = true;
  --self->running_;
  self->switch_back();
}

void Fibers::switch_to(Fiber& fiber) {
  if (!fiber.begun) {
    fiber.begun = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    const auto self = reinterpret_cast<std::uintptr_t>(this);
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Fibers::enter), 2,
                static_cast<unsigned>(self >> 32), static_cast<unsigned>(self & 0xffffffffu));
  }
  swapcontext(&main_->context, &fiber.context);
}

void Fibers::switch_back() {
  swapcontext(&fibers_[static_cast<std::size_t>(current_)]->context, &main_->context);
}

void Fibers::may_pause() {
  if (random_.below(kPauseOneIn) == 0) switch_back();
}

void Fibers::wait_until(const std::function<bool()>& ready, const std::string& waiting_for) {
  may_pause();
  if (ready()) return;
  Fiber& fiber = *fibers_[static_cast<std::size_t>(current_)];
  fiber.ready = &ready;
  fiber.waiting_for = &waiting_for;
  switch_back();
  fiber.ready = nullptr;
}

/// Runs one random event or one random fiber that is ready.
void Fibers::step() {
  const auto fibers = static_cast<std::int64_t>(fibers_.size());
  const std::int64_t choices = fibers + static_cast<std::int64_t>(events_.size());
  const std::int64_t first = random_.below(choices);
  for (std::int64_t i = 0; i < choices; ++i) {
    const std::int64_t choice = (first + i) % choices;
    if (choice >= fibers) {
      const auto at = static_cast<std::size_t>(choice - fibers);
      const std::function<void()> event = std::move(events_[at]);
      events_[at] = std::move(events_.back());
      events_.pop_back();
      event();
      return;
    }
    Fiber& fiber = *fibers_[static_cast<std::size_t>(choice)];
    if (fiber.ended) continue;
    current_ = static_cast<int>(choice);
    if (fiber.ready != nullptr && !(*fiber.ready)()) continue;
    switch_to(fiber);
    return;
  }
  throw Violation{deadlock()};
}

void Fibers::run() {
  while (running_ > 0 || !events_.empty()) {
    step();
    if (failed_) throw violation_;
  }
}

std::string Fibers::deadlock() const {
  std::string text = "deadlock:";
  for (const auto& fiber : fibers_) {
    if (!fiber->ended && fiber->waiting_for != nullptr) {
      text += "\n  " + fiber->name + " waits for " + *fiber->waiting_for;
    }
  }
  return text;
}

}  // namespace flashcore::protocol
