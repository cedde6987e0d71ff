// The tensors of one attention call in host memory, random or from files.
#pragma once

#include <string>

#include "cli/args.h"
#include "verify/inputs/call.h"

namespace flashcore::tool {

/// The outputs are filled with poison values.
struct HostCase : verify::HostCall {
  std::string name;  ///< name of the case; empty: none
};

HostCase random_host_case(const verify::CaseSpec& spec);

/// Loads q, k, v and the optional tensors from the .npy files of the arguments. Throws
/// CommandError.
HostCase file_host_case(const RunArgs& args);

}  // namespace flashcore::tool
