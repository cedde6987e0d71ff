// Execution of a warp. Lanes that diverge form groups. The runnable group with the lowest pc runs,
// which makes lanes meet again at the end of a branch. A group that waits lets the others go on, as
// the hardware guarantees since sm_70.
#include "emulator/machine/warp.h"

#include <algorithm>
#include <cstdio>

#include "emulator/machine/grid.h"

namespace flashcore::emulator {

Warp::Warp(Cta& cta, int index, std::uint32_t lanes)
    : cta_(&cta),
      races_(cta.cluster->races.get()),
      program_(cta.grid->program),
      constants_(program_->constants.data()),
      index_(index),
      live_(lanes),
      parked_{{0, lanes, false}},
      registers_(cta.grid->take_buffer(program_->register_bytes)),
      local_(program_->local_bytes * kLanes, 0xff) {}

Warp::Result Warp::run(int budget) {
  const Instruction* const code = program_->code.data();
  bool progressed = false;
  for (Group& group : parked_) group.blocked = false;
  // The groups take turns, because one may poll for what another one does: the last to run is last.
  if (!start_group(parked_.begin())) return done() ? Result::done : Result::blocked;
  for (; budget > 0; --budget) {
    if (pc_ >= merge_pc_) {
      park(pc_, active_, false);
      pick();
    }
    const Instruction& i = code[pc_];
    ++instructions;
    std::uint32_t mask = active_;
    if (i.guard >= 0) {
      const std::uint32_t guard = *in<std::uint32_t>(i.guard);
      mask &= i.guard_negated ? ~guard : guard;
      if (mask == 0) {
        ++pc_;
        progressed = true;
        continue;
      }
    }
    const Step step = i.handler(*this, i, mask);
    if (step == Step::next) {
      ++pc_;
      progressed = true;
    } else if (step == Step::jumped) {
      progressed = true;
      if (active_ == 0 && !pick()) break;
    } else {
      if (mask != active_) park(pc_ + 1, active_ & ~mask, false);
      park(pc_, mask, true);
      active_ = 0;
      if (!pick()) break;
    }
  }
  if (active_ != 0) {  // the budget is spent; this group can go on, even if another was blocked
    park(pc_, active_, false);
    progressed = true;
  }
  active_ = 0;
  if (done()) return Result::done;
  return progressed ? Result::progressed : Result::blocked;
}

void Warp::park(std::uint32_t pc, std::uint32_t mask, bool blocked) {
  if (mask == 0) return;
  for (Group& group : parked_) {
    if (group.pc == pc) {
      group.mask |= mask;
      // New lanes may complete a collective that the others wait at.
      group.blocked = group.blocked && blocked;
      return;
    }
  }
  parked_.push_back({pc, mask, blocked});
}

bool Warp::pick() {
  auto best = parked_.end();
  for (auto group = parked_.begin(); group != parked_.end(); ++group) {
    if (!group->blocked && (best == parked_.end() || group->pc < best->pc)) best = group;
  }
  return start_group(best);
}

bool Warp::start_group(std::vector<Group>::iterator group) {
  active_ = 0;
  merge_pc_ = kFullMask;
  if (group == parked_.end()) return false;
  pc_ = group->pc;
  active_ = group->mask;
  parked_.erase(group);
  for (const Group& other : parked_) {
    if (other.pc > pc_) merge_pc_ = std::min(merge_pc_, other.pc);
  }
  return true;
}

Step Warp::branch(std::uint32_t mask, std::uint32_t target) {
  const std::uint32_t others = active_ & ~mask;
  if (others == 0 && parked_.empty()) {
    pc_ = target;
    return Step::jumped;
  }
  park(target, mask, false);
  park(pc_ + 1, others, false);
  active_ = 0;
  pick();
  return Step::jumped;
}

Step Warp::exit(std::uint32_t mask) {
  const std::uint32_t others = active_ & ~mask;
  live_ &= ~mask;
  active_ = 0;
  park(pc_ + 1, others, false);
  // A collective that waits for the exited lanes can go on.
  for (Group& group : parked_) group.blocked = false;
  if (live_ == 0) {
    for (const PendingStore& store : stores) store.run();
    cta_->on_warp_exit();
    cta_->grid->return_buffer(std::move(registers_));
  }
  return Step::jumped;
}

std::uint32_t Warp::thread_of(int lane) const {
  return static_cast<std::uint32_t>(cta_->rank * cta_->grid->block.count()) +
         static_cast<std::uint32_t>(index_ * kLanes + lane);
}

std::string Warp::describe() const {
  std::string text;
  const auto add = [&](std::uint32_t pc, std::uint32_t mask) {
    char line[160];
    std::snprintf(line, sizeof line, "\n    warp %d lanes %08x at PTX line %d: %s", index_, mask,
                  program_->code[pc].line, program_->opcodes[pc].c_str());
    text += line;
  };
  if (active_ != 0) add(pc_, active_);
  for (const Group& group : parked_) add(group.pc, group.mask);
  return text;
}

std::uint8_t* Warp::resolve(Space space, std::uint64_t address, int bytes, int align, int lane) {
  if (space == Space::generic) {
    switch (address >> kSpaceShift) {
      case kSharedWindow >> kSpaceShift: space = Space::shared; break;
      case kLocalWindow >> kSpaceShift: space = Space::local; break;
      case kParamWindow >> kSpaceShift: space = Space::param; break;
      default: space = Space::global;
    }
  }
  if ((address & static_cast<std::uint64_t>(align - 1)) != 0) {
    char text[96];
    std::snprintf(text, sizeof text, "misaligned access of %d bytes at address 0x%llx", align,
                  static_cast<unsigned long long>(address));
    fail(text, lane);
  }
  const auto outside = [&](const char* where, std::uint64_t size) {
    char text[160];
    std::snprintf(text, sizeof text, "access of %d bytes at 0x%llx outside %s (%llu bytes)", bytes,
                  static_cast<unsigned long long>(address), where,
                  static_cast<unsigned long long>(size));
    fail(text, lane);
  };
  if (space == Space::global) {
    const auto generation = device_memory().generation();
    if (generation != cached_generation_ || !cached_.holds(address, bytes)) {
      cached_ = device_memory().find(address);
      cached_generation_ = generation;
      if (!cached_.holds(address, bytes)) {
        outside(cached_.end == 0 ? "every allocation" : "its allocation",
                cached_.end - cached_.first);
      }
    }
    return reinterpret_cast<std::uint8_t*>(address);
  }
  if (space == Space::shared) return cta_->shared_at(address, bytes, *this, lane);
  const std::uint64_t offset = address & (kSharedWindow - 1);
  if (space == Space::local) {
    if (offset + bytes > program_->local_bytes) outside("local memory", program_->local_bytes);
    return local_.data() + program_->local_bytes * lane + offset;
  }
  std::vector<std::uint8_t>& params = cta_->grid->params;
  if (offset + bytes > params.size()) outside("the parameters", params.size());
  return params.data() + offset;
}

}  // namespace flashcore::emulator
