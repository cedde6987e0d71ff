#include "fibers.h"

#include <ucontext.h>

#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

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
#if defined(__SANITIZE_ADDRESS__)
  // A fiber that never ended has left its red zones there.
  ASAN_UNPOISON_MEMORY_REGION(stack.get(), kStackBytes);
#endif
  return stack;
}

// AddressSanitizer must know every change of the stack.
struct Stack {
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  void* fake = nullptr;  // AddressSanitizer's frames of it
};

/// Leaves stack `from` for stack `to`. ends: for the last time.
void begin_switch([[maybe_unused]] Stack& from, [[maybe_unused]] const Stack& to,
                  [[maybe_unused]] bool ends) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake, to.bottom, to.bytes);
#endif
}

/// Arrives on stack `to`; notes the bounds of the stack it has left.
void end_switch([[maybe_unused]] const Stack& to, [[maybe_unused]] Stack& from) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(to.fake, &from.bottom, &from.bytes);
#endif
}

/// Thrown in a fiber that will not run again, so that it frees what it owns.
struct Abandoned {};

}  // namespace

struct Fibers::Fiber {
  std::string name;
  std::function<void()> body;
  std::unique_ptr<char[]> memory = take_stack();
  Stack stack{memory.get(), kStackBytes};
  ucontext_t context{};
  const std::function<bool()>* ready = nullptr;  // null: not waiting
  const std::string* waiting_for = nullptr;
  bool begun = false, ended = false;
};

struct Fibers::Main {
  Stack stack;
  ucontext_t context{};
};

Fibers::Fibers(std::uint64_t seed) : random_(seed), main_(std::make_unique<Main>()) {}

Fibers::~Fibers() {
  abandoned_ = true;
  for (std::size_t i = 0; i < fibers_.size(); ++i) {
    if (!fibers_[i]->begun || fibers_[i]->ended) continue;
    current_ = static_cast<int>(i);
    switch_to(*fibers_[i]);
  }
  for (const auto& fiber : fibers_) free_stacks().push_back(std::move(fiber->memory));
}

int Fibers::add(std::string name, std::function<void()> body) {
  fibers_.push_back(std::make_unique<Fiber>());
  fibers_.back()->name = std::move(name);
  fibers_.back()->body = std::move(body);
  running_.push_back(static_cast<int>(fibers_.size()) - 1);
  return running_.back();
}

void Fibers::later(std::function<void()> event) { events_.push_back(std::move(event)); }

const std::string& Fibers::name(int fiber) const {
  return fibers_[static_cast<std::size_t>(fiber)]->name;
}

void Fibers::enter(unsigned high, unsigned low) {
  auto* self = reinterpret_cast<Fibers*>((static_cast<std::uintptr_t>(high) << 32) | low);
  Fiber& fiber = *self->fibers_[static_cast<std::size_t>(self->current_)];
  end_switch(fiber.stack, self->main_->stack);
  try {
    fiber.body();
  } catch (const Violation& violation) {
    self->failed_ = true;
    self->violation_ = {fiber.name + ": " + violation.message};
  } catch (const Abandoned&) {
  }
  fiber.ended = true;
  self->switch_back();
}

void Fibers::switch_to(Fiber& fiber) {
  if (!fiber.begun) {
    fiber.begun = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.memory.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    const auto self = reinterpret_cast<std::uintptr_t>(this);
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Fibers::enter), 2,
                static_cast<unsigned>(self >> 32), static_cast<unsigned>(self & 0xffffffffu));
  }
  begin_switch(main_->stack, fiber.stack, false);
  swapcontext(&main_->context, &fiber.context);
  Stack left;
  end_switch(main_->stack, left);
}

void Fibers::switch_back() {
  Fiber& fiber = *fibers_[static_cast<std::size_t>(current_)];
  begin_switch(fiber.stack, main_->stack, fiber.ended);
  swapcontext(&fiber.context, &main_->context);
  end_switch(fiber.stack, main_->stack);
  if (abandoned_) throw Abandoned{};
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
  const std::size_t fibers = running_.size();
  const std::size_t choices = fibers + events_.size();
  auto choice = static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(choices)));
  for (std::size_t tried = 0; tried < choices;
       ++tried, choice = choice + 1 < choices ? choice + 1 : 0) {
    if (choice >= fibers) {
      const std::size_t at = choice - fibers;
      const std::function<void()> event = std::move(events_[at]);
      events_[at] = std::move(events_.back());
      events_.pop_back();
      event();
      return;
    }
    current_ = running_[choice];
    Fiber& fiber = *fibers_[static_cast<std::size_t>(current_)];
    if (fiber.ready != nullptr && !(*fiber.ready)()) continue;
    switch_to(fiber);
    if (fiber.ended) {
      running_[choice] = running_.back();
      running_.pop_back();
    }
    return;
  }
  throw Violation{deadlock()};
}

void Fibers::run() {
  while (!running_.empty() || !events_.empty()) {
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
