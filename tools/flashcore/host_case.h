// One attention call's tensors in host memory, random or from files, ready to be copied to a
// device.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "args.h"
#include "flashcore/attention.h"
#include "verify/case.h"

namespace flashcore::tool {

/// All tensors lie in one block, so a copy of the block is the same call elsewhere. Outputs hold
/// the checks' poison.
struct HostCase {
  std::string name;              ///< of the case; empty: none
  std::vector<std::byte> bytes;  ///< at any address: the views move with it
  Tensors tensors;               ///< views into bytes
  Options options;

  HostCase() = default;
  HostCase(HostCase&&) = default;
  HostCase& operator=(HostCase&&) = default;

  /// The same views into a copy of bytes at `base` on `device`.
  Tensors at(void* base, Device device) const;
};

HostCase random_host_case(const verify::CaseSpec& spec);

/// q, k, v and whatever else the arguments name, from .npy files. Throws CommandError.
HostCase file_host_case(const RunArgs& args);

}  // namespace flashcore::tool
