// One attention call's tensors in host memory, random or from files, ready to be copied to a
// device.
#pragma once

#include <string>

#include "cli/args.h"
#include "verify/inputs/call.h"

namespace flashcore::tool {

/// Outputs hold the checks' poison.
struct HostCase : verify::HostCall {
  std::string name;  ///< of the case; empty: none
};

HostCase random_host_case(const verify::CaseSpec& spec);

/// q, k, v and whatever else the arguments name, from .npy files. Throws CommandError.
HostCase file_host_case(const RunArgs& args);

}  // namespace flashcore::tool
