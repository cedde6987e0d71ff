#pragma once

#include <cstdint>

namespace flashcore::emulator {

class Warp;

/// Completes all cp.async of the lanes.
void finish_copies(Warp& warp, std::uint32_t mask);

}  // namespace flashcore::emulator
