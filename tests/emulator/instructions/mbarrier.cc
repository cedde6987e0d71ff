// mbarrier: arrivals, expected bytes and waits; st.async, whose bytes count towards one.
#include <cstdint>
#include <vector>

#include "emulator/instructions/copy.h"
#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"
#include "emulator/machine/grid.h"
#include "emulator/machine/mbarrier.h"

namespace flashcore::emulator {
namespace {

/// The operand as an unsigned number, from a register of 4 or 8 bytes.
std::uint64_t number(Warp& w, const Instruction& i, int op, int lane) {
  return w.in<std::uint32_t>(i.ops[op])[lane];
}

Step init(Warp& w, const Instruction& i, std::uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    const std::uint64_t count = number(w, i, 1, lane);
    if (count == 0 || count >= Mbarrier::kPhase)
      w.fail("mbarrier.init with an impossible count", lane);
    Mbarrier barrier;
    barrier.pending = barrier.expected_and_phase = static_cast<std::uint16_t>(count);
    std::uint8_t* memory = w.resolve(Space::shared, w.address(i, 0, lane), 8, 8, lane);
    std::memcpy(memory, &barrier, sizeof barrier);
    if (Races* races = w.races()) races->init(memory);
  });
  return Step::next;
}

Step invalidate(Warp& w, const Instruction& i, std::uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    std::memset(find_mbarrier_at(w, w.address(i, 0, lane), lane), 0xff, sizeof(Mbarrier));
  });
  return Step::next;
}

void arrive_at(Warp& w, std::uint8_t* memory, std::uint64_t count, std::int32_t bytes, bool drop,
               int lane) {
  const bool ends = change_mbarrier(memory, [&](Mbarrier& barrier) {
    if (count > barrier.pending)
      w.fail("more arrivals at an mbarrier than its phase expects", lane);
    barrier.bytes += bytes;
    barrier.pending = static_cast<std::uint16_t>(barrier.pending - count);
    if (drop)
      barrier.expected_and_phase = static_cast<std::uint16_t>(barrier.expected_and_phase - count);
  });
  if (Races* races = w.races()) {
    races->arrive(memory, w.thread_of(lane));
    if (ends) races->complete(memory);
  }
}

/// mbarrier.arrive{.expect_tx} state, [barrier]{, count or bytes}. Aux: 1 expect_tx, 2 drop, 4
/// without a state. The state is the parity of the phase.
Step arrive(Warp& w, const Instruction& i, std::uint32_t mask) {
  const bool expects = (i.aux & 1) != 0, has_state = (i.aux & 4) == 0;
  const int at = has_state ? 1 : 0;
  for_lanes(mask, [&](int lane) {
    std::uint8_t* memory = find_mbarrier_at(w, w.address(i, at, lane), lane);
    Mbarrier before;
    std::memcpy(&before, memory, sizeof before);
    if (has_state) w.out<std::uint64_t>(i.ops[0])[lane] = before.odd();
    const std::uint64_t given = i.op_count > at + 1 ? number(w, i, at + 1, lane) : 1;
    arrive_at(w, memory, expects ? 1 : given, expects ? static_cast<std::int32_t>(given) : 0,
              (i.aux & 2) != 0, lane);
  });
  return Step::next;
}

template <int kSign>
Step change_bytes(Warp& w, const Instruction& i, std::uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    std::uint8_t* memory = find_mbarrier_at(w, w.address(i, 0, lane), lane);
    const std::int32_t bytes = kSign * static_cast<std::int32_t>(number(w, i, 1, lane));
    const bool ends = change_mbarrier(memory, [&](Mbarrier& barrier) { barrier.bytes -= bytes; });
    if (ends && w.races() != nullptr) w.races()->complete(memory);
  });
  return Step::next;
}

/// test_wait and try_wait, by parity or by state. A try_wait that fails suspends the lanes: it may
/// return false only after a time limit, which does not exist here.
template <bool kBlocking, bool kParity>
Step wait(Warp& w, const Instruction& i, std::uint32_t mask) {
  std::uint32_t complete = 0;
  for_lanes(mask, [&](int lane) {
    const std::uint8_t* memory = find_mbarrier_at(w, w.address(i, 1, lane), lane);
    Mbarrier barrier;
    std::memcpy(&barrier, memory, sizeof barrier);
    const std::uint64_t parity =
        kParity ? number(w, i, 2, lane) : w.in<std::uint64_t>(i.ops[2])[lane];
    if (parity > 1) w.fail("the parity of an mbarrier's phase is neither 0 nor 1", lane);
    const bool completed = barrier.odd() != (parity != 0);
    complete |= static_cast<std::uint32_t>(completed) << lane;
    if (completed && w.races() != nullptr) w.races()->wait(memory, w.thread_of(lane));
  });
  if (kBlocking && complete == 0) return Step::blocked;
  w.set_predicate(i.ops[0], mask, complete);
  return Step::next;
}

/// cp.async.mbarrier.arrive: arrives when the lane's copies have completed, which is now. Without
/// .noinc the phase expects one more arrival.
template <bool kNoInc>
Step arrive_after_copies(Warp& w, const Instruction& i, std::uint32_t mask) {
  finish_copies(w, mask);
  for_lanes(mask, [&](int lane) {
    std::uint8_t* memory = find_mbarrier_at(w, w.address(i, 0, lane), lane);
    if (kNoInc) arrive_at(w, memory, 1, 0, false, lane);
  });
  return Step::next;
}

/// st.async [to], values, [barrier].
template <int kCount>
Step store_async(Warp& w, const Instruction& i, std::uint32_t mask) {
  const int element = i.second_bytes, bytes = kCount * element;
  for_lanes(mask, [&](int lane) {
    std::uint8_t* to = w.resolve(Space::shared, w.address(i, 0, lane), bytes, bytes, lane);
    const std::uint64_t at = i.address_bytes == 8 ? w.in<std::uint64_t>(i.ops[1 + kCount])[lane]
                                                  : w.in<std::uint32_t>(i.ops[1 + kCount])[lane];
    std::uint8_t* barrier = find_mbarrier_at(w, at, lane);
    std::vector<std::uint8_t> data(static_cast<std::size_t>(bytes));
    for (int k = 0; k < kCount; ++k) {
      std::memcpy(&data[k * element], w.in<std::uint8_t>(i.ops[1 + k]) + lane * element, element);
    }
    w.cta().grid->later([to, data, in_flight = CopyInFlight(w, lane, barrier)] {
      const auto size = static_cast<std::int32_t>(data.size());
      in_flight.note_write(to, size);
      std::memcpy(to, data.data(), data.size());
      in_flight.complete(size);
    });
  });
  return Step::next;
}

Handler find_wait(const Opcode& opcode) {
  const bool parity = opcode.has("parity");
  if (opcode.has("test_wait")) return parity ? wait<false, true> : wait<false, false>;
  if (opcode.has("try_wait")) return parity ? wait<true, true> : wait<true, false>;
  return nullptr;
}

}  // namespace

bool find_mbarrier(const Opcode& opcode, Recipe& recipe) {
  for (int& bytes : recipe.immediate_bytes) bytes = 4;
  if (opcode.starts("cp.async.mbarrier.arrive")) {
    recipe.handler = opcode.has("noinc") ? arrive_after_copies<true> : arrive_after_copies<false>;
    return true;
  }
  if (opcode.starts("st.async")) {
    const int count = opcode.vector_size();
    recipe.handler = count == 4 ? store_async<4> : count == 2 ? store_async<2> : store_async<1>;
    return true;
  }
  if (opcode.base() != "mbarrier" || opcode.has("noComplete")) return false;
  const bool is_arrive = opcode.has("arrive") || opcode.has("arrive_drop");
  if (is_arrive)
    recipe.aux = (opcode.has("expect_tx") ? 1u : 0u) | (opcode.has("arrive_drop") ? 2u : 0u);
  if (opcode.has("init")) recipe.handler = init;
  if (opcode.has("inval")) recipe.handler = invalidate;
  if (is_arrive) recipe.handler = arrive;
  if (!is_arrive && opcode.has("expect_tx")) recipe.handler = change_bytes<-1>;
  if (opcode.has("complete_tx")) recipe.handler = change_bytes<1>;
  if (recipe.handler == nullptr) recipe.handler = find_wait(opcode);
  return recipe.handler != nullptr;
}

}  // namespace flashcore::emulator
