// The emulated GPU, chosen by environment variables:
//   FLASHCORE_EMULATE        sm_75, sm_80, sm_86, sm_89 or sm_90 (default: an H200)
//   FLASHCORE_EMULATE_SMS    the number of SMs: few make persistent CTAs process several tiles
//   FLASHCORE_EMULATE_SEED   not 0: random interleavings of warps and CTAs, random delays of copies
//   FLASHCORE_EMULATE_CTAS   the number of CTAs that run at the same time
//   FLASHCORE_EMULATE_RACES  1: a race in shared memory is an error (races.h)
#pragma once

#include <cstdint>

namespace flashcore::emulator {

struct DeviceModel {
  const char* name;
  int compute_capability, sm_count;
  int shared_per_block, shared_per_sm, threads_per_sm;
  int l2_bytes, clock_khz, memory_khz, bus_bits;
  std::uint64_t memory_bytes;
};

/// Read once from the environment.
const DeviceModel& device_model();
/// The seed of the next launch: 0, or a different one each time.
std::uint64_t next_seed();
int resident_ctas();
bool finds_races();

}  // namespace flashcore::emulator
