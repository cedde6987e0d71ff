// Kernel launches: grid, clusters, programmatic dependent launch (PDL) and shared memory.
#pragma once

#include <cstdint>

#include "flashcore/attention.h"

namespace flashcore::core {
struct AttentionParams;
}

namespace flashcore::cuda {

struct LaunchOptions {
  std::int64_t ctas = 1;
  int threads = 0;
  int smem_bytes = 0;
  bool programmatic_launch = false;  // PDL: the kernel itself waits for the previous kernel
  int cluster = 1;                   // CTAs per cluster
  bool balance_clusters = false;     // prefer load balancing, for more CTAs than SMs
};

/// Launches `entry`, whose only argument is at `params`.
Status launch_entry(const void* entry, void* params, const LaunchOptions& options,
                    Stream stream) noexcept;

template <typename Params>
Status launch_kernel(const void* entry, const Params& params, const LaunchOptions& options,
                     Stream stream) noexcept {
  return launch_entry(entry, const_cast<Params*>(&params), options, stream);
}

/// Raises the kernel's limit of dynamic shared memory to the device's. CUDA requires this opt-in
/// above 48 KiB, once per kernel and device.
Status allow_shared_memory(const KernelInfo& kernel, const void* entry, int device) noexcept;

/// Launches the plan's attention kernel on the plan's device.
Status launch_attention(const Plan& plan, const core::AttentionParams& params, Stream stream);

/// Launches a kernel that does nothing.
Status launch_empty(Device device, Stream stream);

}  // namespace flashcore::cuda
