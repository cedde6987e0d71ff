// Targets of the verifier's calls: a FlashCore kernel, or a function of a shared library.
#pragma once

#include <memory>
#include <string>

#include "data/devices.h"
#include "verify/implementation.h"

namespace flashcore::tool {

/// Calls FlashCore kernels, one at a time.
class KernelTarget : public verify::CallTarget {
 public:
  /// Selects the kernel of the next calls by its id. With a backward kernel the planner chooses
  /// those of the forward pass.
  virtual void choose(const KernelInfo& kernel) = 0;
};

/// Runs the kernels in this process.
std::unique_ptr<KernelTarget> kernels_here(const Target& target);

/// Runs the kernels in a child process, because a kernel might not end. A call that takes longer
/// than limit_s is a fault: the child is killed, and the next call starts a new one.
std::unique_ptr<KernelTarget> kernel_child(const DeviceArgs& device, double limit_s);

/// Calls a library's function in a child process, so that a crash of the function does not end the
/// report. limit_s 0: no limit. The backward pass is the function <symbol>_backward, if there is
/// one.
std::unique_ptr<verify::CallTarget> library_target(const std::string& library,
                                                   const std::string& symbol,
                                                   const std::string& device, double limit_s);

/// The child: calls the library's function, or our kernels if `library` is empty, on request until
/// the parent closes the pipe.
int serve_verify(const std::string& library, const std::string& symbol, const DeviceArgs& device);

/// Runs one call of a kernel (null: the planner chooses). Its tensors are in the `bytes` bytes of
/// host memory at `base`.
Status run_call(const Target& target, const char* kernel, const flashcore_verify_call& call,
                std::byte* base, std::size_t bytes);
Status run_backward_call(const Target& target, const char* kernel,
                         const flashcore_verify_backward_call& call, std::byte* base,
                         std::size_t bytes);

}  // namespace flashcore::tool
