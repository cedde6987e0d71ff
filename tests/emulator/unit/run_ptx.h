// Runs PTX snippets on the emulator.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "emulator/machine/grid.h"

namespace flashcore::emulator {

struct SnippetOptions {
  std::uint32_t threads = 32, ctas = 1, cluster = 1;
  std::uint64_t seed = 0;
  bool find_races = false;
  int compute_capability = 90;
};

/// Runs the body of a kernel. It has registers %p0…, %rs0…, %r0…, %f0…, %rd0… to 63, 16 KiB of
/// shared memory `smem`, the address of `memory` in %rd0, and of the thread's word of it in %rd1;
/// %r0 is %tid.x. Returns the report of a fault, or an empty string.
std::string run_ptx(const std::string& body, std::vector<std::uint32_t>& memory,
                    const SnippetOptions& options = {});

}  // namespace flashcore::emulator
