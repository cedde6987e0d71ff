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

/// Changes the barrier by `change` and ends its phase if nothing is pending any more. True if it
/// ended.
template <typename F>
bool change_mbarrier(std::uint8_t* memory, F change) {
  Mbarrier barrier;
  std::memcpy(&barrier, memory, sizeof barrier);
  change(barrier);
  const bool ends = barrier.pending == 0 && barrier.bytes == 0;
  if (ends) {
    barrier.expected_and_phase ^= Mbarrier::kPhase;
    barrier.pending = barrier.expected();
  }
  std::memcpy(memory, &barrier, sizeof barrier);
  return ends;
}

/// An asynchronous copy to shared memory in flight, which counts towards an mbarrier.
struct CopyInFlight {
  Races* races;  // null: not searched for
  Races::Copy copy;
  std::uint8_t* barrier;

  CopyInFlight(const Warp& w, int lane, std::uint8_t* mbarrier)
      : races(w.races()), barrier(mbarrier) {
    if (races != nullptr) copy = races->start_copy(w.place_of(lane));
  }
  void note_write(const std::uint8_t* to, int bytes) const {
    if (races != nullptr) races->write(copy, to, bytes);
  }
  /// The bytes have arrived.
  void complete(std::int32_t bytes) const {
    if (races != nullptr) races->arrive(barrier, copy);
    const bool ends =
        change_mbarrier(barrier, [bytes](Mbarrier& changed) { changed.bytes -= bytes; });
    if (ends && races != nullptr) races->complete(barrier);
  }
};

/// The initialised barrier at an address.
inline std::uint8_t* find_mbarrier_at(Warp& w, std::uint64_t address, int lane) {
  std::uint8_t* memory = w.resolve(Space::shared, address, 8, 8, lane);
  Mbarrier barrier;
  std::memcpy(&barrier, memory, sizeof barrier);
  if (!barrier.valid()) w.fail("the mbarrier is not initialised", lane);
  return memory;
}

}  // namespace flashcore::emulator
