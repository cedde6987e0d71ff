// Where the verifier's calls go: one of our kernels, or a function in somebody's shared library.
#pragma once

#include <memory>
#include <string>

#include "devices.h"
#include "verify/subject.h"

namespace flashcore::tool {

/// Calls of one of our kernels (empty: the planner's choice) on a device.
std::unique_ptr<verify::CallTarget> kernel_target(const Target& target, const char* kernel);

/// A library's function in a child process of this program (started anew after it died), so that
/// what the function does to its process does not end the report.
std::unique_ptr<verify::CallTarget> library_target(const std::string& library,
                                                   const std::string& symbol,
                                                   const std::string& device, double limit_s);

/// The child's side: calls the function as told on standard input until that ends.
int serve_library(const std::string& library, const std::string& symbol, const std::string& device);

}  // namespace flashcore::tool
