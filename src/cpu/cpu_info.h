// Properties and rates of the CPU.
#pragma once

#include "flashcore/plan.h"

namespace flashcore::cpu {

/// The properties of the CPU. `isa` is FLASHCORE_ISA, if this machine has it, or the widest.
/// `threads` is FLASHCORE_THREADS, or the number that affinity and cgroup allow. Rates are 0 until
/// measure_rates().
DeviceInfo query_cpu() noexcept;

/// True if this machine can execute kernels compiled for `isa`.
bool isa_available(Isa isa) noexcept;

/// Measures memory_gbs and f32_tflops with info.threads threads, in about a tenth of a second.
Status measure_rates(DeviceInfo& info) noexcept;

}  // namespace flashcore::cpu
