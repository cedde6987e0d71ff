// The device of a command, and the kernels that it can run.
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
  DeviceInfo real;      ///< this machine's device, with the requested number of threads
  DeviceInfo plan_for;  ///< for the planner: `real`, or the device of --plan-for
};

/// The requested device. "auto" is the first usable GPU, else the CPU.
Target find_target(const DeviceArgs& args);

/// The requested devices. "all" is the CPU and the first usable GPU.
std::vector<Target> find_targets(const DeviceArgs& args);

/// The device with at most `blocks` SMs (0: all). A persistent kernel then has as many CTAs.
DeviceInfo with_blocks(DeviceInfo device, int blocks);

/// True if the kernel is part of this build and the device can run it.
bool runnable(const KernelInfo& kernel, const DeviceInfo& device);

/// A kernel and the device it runs on (an index into the targets).
struct RunnableKernel {
  const KernelInfo* kernel;
  std::size_t target;
};

/// All runnable kernels of an operation whose id matches the regular expression (empty: all).
/// Throws CommandError if there is none.
std::vector<RunnableKernel> find_kernels(const std::string& pattern,
                                         const std::vector<Target>& targets,
                                         Operation op = Operation::fwd);

/// The kernels for a problem: the planner's choice (null) if the pattern is empty, else every
/// matching runnable kernel that takes the problem's dtype, dims and 8-bit inputs.
std::vector<const KernelInfo*> kernels_for(const std::string& pattern, const Target& target,
                                           DType dtype, bool stored_in_8_bits,
                                           std::int64_t head_dim, std::int64_t v_dim);
std::vector<const KernelInfo*> kernels_for(const std::string& pattern, const Target& target,
                                           const verify::CaseSpec& spec);

/// "NVIDIA H200 (cuda:0)"
std::string describe(const Target& target);

}  // namespace flashcore::tool
