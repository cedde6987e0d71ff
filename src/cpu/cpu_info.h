// What the CPU part of this machine can do.
#pragma once

#include "flashcore/plan.h"

namespace flashcore::cpu {

/// The CPU with as many threads as affinity, cgroup and FLASHCORE_THREADS leave to this process.
/// Rates are 0 until measure_rates().
DeviceInfo query_cpu() noexcept;

/// Whether this machine can execute kernels compiled for `isa`.
bool isa_available(Isa isa) noexcept;

/// Fills memory_gbs and f32_tflops by running all of info.threads for about a tenth of a second.
Status measure_rates(DeviceInfo& info) noexcept;

}  // namespace flashcore::cpu
