// The mbarrier object in shared memory. Its 64 bits are opaque to kernels.
#pragma once

#include <cstdint>
#include <cstring>

#include "emulator/machine/warp.h"

namespace flashcore::emulator {

struct Mbarrier {
  static constexpr std::uint16_t kPhase = 0x8000;
  std::uint16_t pending = 0;  // arrivals that the phase still waits for
  std::uint16_t expected_and_phase = 0;
  std::int32_t bytes = 0;  // of asynchronous copies that the phase still waits for

  std::uint16_t expected() const { return expected_and_phase & 0x7fff; }
  bool odd() const { return (expected_and_phase & kPhase) != 0; }
  /// Poisoned memory is no barrier.
  bool valid() const { return expected() != 0 && pending <= expected(); }
};
static_assert(sizeof(Mbarrier) == 8);

/// Changes the barrier by `change` and ends its phase if nothing is pending any more.
template <typename F>
void change_mbarrier(std::uint8_t* memory, F change) {
  Mbarrier barrier;
  std::memcpy(&barrier, memory, sizeof barrier);
  change(barrier);
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.expected_and_phase ^= Mbarrier::kPhase;
    barrier.pending = barrier.expected();
  }
  std::memcpy(memory, &barrier, sizeof barrier);
}

/// Bytes of an asynchronous copy have arrived.
inline void complete_bytes(std::uint8_t* memory, std::int32_t bytes) {
  change_mbarrier(memory, [bytes](Mbarrier& barrier) { barrier.bytes -= bytes; });
}

/// The initialised barrier at an address.
inline std::uint8_t* find_mbarrier_at(Warp& w, std::uint64_t address, int lane) {
  std::uint8_t* memory = w.resolve(Space::shared, address, 8, 8, lane);
  Mbarrier barrier;
  std::memcpy(&barrier, memory, sizeof barrier);
  if (!barrier.valid()) w.fail("the mbarrier is not initialised", lane);
  return memory;
}

}  // namespace flashcore::emulator
