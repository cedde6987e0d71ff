// Where the verifier's calls go: one of our kernels, or a function in somebody's shared library.
#pragma once

#include <memory>
#include <string>

#include "data/devices.h"
#include "verify/implementation.h"

namespace flashcore::tool {

/// Calls of our kernels, one after the other.
class KernelTarget : public verify::CallTarget {
 public:
  /// The kernel of the calls to come, by its id.
  virtual void choose(const char* kernel) = 0;
};

/// In this process.
std::unique_ptr<KernelTarget> kernels_here(const Target& target);

/// In a child process of this program (started anew after it was ended), for kernels that might not
/// end: a call that takes longer than limit_s is a fault.
std::unique_ptr<KernelTarget> kernel_child(const DeviceArgs& device, double limit_s);

/// A library's function, in a child process as well, so that what the function does to its process
/// does not end the report. limit_s 0: a call may take as long as it likes.
std::unique_ptr<verify::CallTarget> library_target(const std::string& library,
                                                   const std::string& symbol,
                                                   const std::string& device, double limit_s);

/// The child's side: calls the library's function, or where `library` is empty our kernels, as told
/// until the parent closes the pipe.
int serve_verify(const std::string& library, const std::string& symbol, const DeviceArgs& device);

/// One call of a kernel. Its tensors lie in `bytes` bytes of host memory from `base`.
Status run_call(const Target& target, const char* kernel, const flashcore_verify_call& call,
                std::byte* base, std::size_t bytes);

}  // namespace flashcore::tool
