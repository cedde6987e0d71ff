// Which device a command uses, and which kernels can run on it.
#pragma once

#include <string>
#include <vector>

#include "backend/backend.h"
#include "cli/args.h"
#include "verify/inputs/case.h"

namespace flashcore::tool {

struct Target {
  Device device;
  const Backend* backend = nullptr;
  DeviceInfo real;      ///< as found, with the number of threads asked for
  DeviceInfo plan_for;  ///< what the planner is told: real, or --plan-for's tiles on this device
};

/// The device asked for; "auto" is the first GPU that can be used, else the CPU.
Target find_target(const DeviceArgs& args);

/// The same, where "all" means the CPU and, if it can be used, the first GPU.
std::vector<Target> find_targets(const DeviceArgs& args);

/// A GPU of so many SMs at most (0: all it has), so that a persistent kernel has so many blocks.
DeviceInfo with_blocks(DeviceInfo device, int blocks);

/// Whether the kernel is part of this build and the device can execute it.
bool runnable(const KernelInfo& kernel, const DeviceInfo& device);

/// A kernel and the device it runs on (an index into the targets).
struct RunnableKernel {
  const KernelInfo* kernel;
  std::size_t target;
};

/// All runnable kernels whose id the regular expression finds (empty: all). None is an error.
std::vector<RunnableKernel> find_kernels(const std::string& pattern,
                                         const std::vector<Target>& targets);

/// The kernels that shall run a problem: the planner's choice (null) where the pattern is empty,
/// else every runnable kernel it finds that takes the problem's dtype and dims, and 8-bit inputs
/// where there are some.
std::vector<const KernelInfo*> kernels_for(const std::string& pattern, const Target& target,
                                           DType dtype, bool stored_in_8_bits,
                                           std::int64_t head_dim, std::int64_t v_dim);
std::vector<const KernelInfo*> kernels_for(const std::string& pattern, const Target& target,
                                           const verify::CaseSpec& spec);

/// "NVIDIA H200 (cuda:0)"
std::string describe(const Target& target);

}  // namespace flashcore::tool
