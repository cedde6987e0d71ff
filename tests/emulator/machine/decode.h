// Parsed PTX to a program.
#pragma once

#include <map>
#include <string_view>

#include "emulator/machine/program.h"
#include "emulator/ptx/module.h"

namespace flashcore::emulator {

/// Addresses of the module's variables in global memory.
using GlobalAddresses = std::map<std::string_view, std::uint64_t>;

/// Decodes a kernel. Ends in std::runtime_error with the line if it has an unknown instruction.
std::unique_ptr<Program> decode(ptx::Module& module, ptx::Function& entry,
                                const GlobalAddresses& globals);

}  // namespace flashcore::emulator
