// The kernels of the program: host functions, their PTX, decoded at the first launch.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "emulator/machine/decode.h"

namespace flashcore::emulator {

struct Kernel {
  std::string name;
  const void* binary = nullptr;
  int max_dynamic_shared = 48 * 1024;
  std::unique_ptr<Program> program;
};

void register_kernel(const void* binary, const void* host, const char* name);
/// Null if the program has no such kernel.
Kernel* find_kernel(const void* host);
/// Decodes the PTX for the emulated device. Ends in std::runtime_error if there is none.
const Program& program_of(Kernel& kernel);

}  // namespace flashcore::emulator
