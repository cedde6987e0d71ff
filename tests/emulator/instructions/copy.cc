// cp.async: 4, 8 or 16 bytes per lane from global to shared memory. The bytes arrive when a wait
// requires it, so a kernel that reads them without a wait reads the old ones.
#include <cstdint>
#include <cstring>

#include "emulator/instructions/copy.h"
#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"

namespace flashcore::emulator {
namespace {

/// cp.async [to], [from], bytes[, valid bytes].
Step copy(Warp& w, const Instruction& i, std::uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    const auto bytes = static_cast<int>(w.in<std::uint32_t>(i.ops[2])[lane]);
    std::uint32_t valid = static_cast<std::uint32_t>(bytes);
    if (i.op_count > 3) valid = w.in<std::uint32_t>(i.ops[3])[lane];
    if (valid > static_cast<std::uint32_t>(bytes))
      w.fail("cp.async of more bytes than its size", lane);
    const std::uint64_t to = i.address_bytes == 8 ? w.in<std::uint64_t>(i.ops[0])[lane]
                                                  : w.in<std::uint32_t>(i.ops[0])[lane];
    const std::uint64_t from = w.in<std::uint64_t>(i.ops[1])[lane];
    PendingCopy pending;
    pending.group = w.copy_groups[lane];
    pending.to = w.resolve(Space::shared, to + i.imm, bytes, bytes, lane);
    pending.from =
        valid == 0 ? nullptr : w.resolve(Space::global, from, static_cast<int>(valid), bytes, lane);
    pending.lane = static_cast<std::uint8_t>(lane);
    pending.bytes = static_cast<std::uint8_t>(bytes);
    pending.valid_bytes = static_cast<std::uint8_t>(valid);
    w.copies.push_back(pending);
  });
  return Step::next;
}

Step commit(Warp& w, const Instruction&, std::uint32_t mask) {
  for_lanes(mask, [&](int lane) { ++w.copy_groups[lane]; });
  return Step::next;
}

void finish(Warp& w, std::uint32_t mask, std::uint64_t in_flight, bool also_uncommitted) {
  std::erase_if(w.copies, [&](const PendingCopy& copy) {
    if ((mask >> copy.lane & 1) == 0) return false;
    if (!also_uncommitted && copy.group + in_flight >= w.copy_groups[copy.lane]) return false;
    std::uint8_t value[16] = {};
    if (copy.valid_bytes != 0) std::memcpy(value, copy.from, copy.valid_bytes);
    w.note_write(copy.to, value, copy.bytes, copy.lane);
    std::memcpy(copy.to, value, copy.bytes);
    return true;
  });
}

Step wait_group(Warp& w, const Instruction& i, std::uint32_t mask) {
  finish(w, mask, w.in<std::uint32_t>(i.ops[0])[0], false);
  return Step::next;
}
Step wait_all(Warp& w, const Instruction&, std::uint32_t mask) {
  finish_copies(w, mask);
  return Step::next;
}

}  // namespace

void finish_copies(Warp& w, std::uint32_t mask) { finish(w, mask, 0, true); }

bool find_copy(const Opcode& opcode, Recipe& recipe) {
  if (!opcode.starts("cp.async") || opcode.has("bulk") || opcode.has("mbarrier")) return false;
  for (int& bytes : recipe.immediate_bytes) bytes = 4;
  if (opcode.has("commit_group")) {
    recipe.handler = commit;
  } else if (opcode.has("wait_group")) {
    recipe.handler = wait_group;
  } else if (opcode.has("wait_all")) {
    recipe.handler = wait_all;
  } else {
    recipe.handler = copy;
  }
  return true;
}

}  // namespace flashcore::emulator
