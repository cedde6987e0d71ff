// Address spaces. A generic address names its space in the top byte; global ones are host
// addresses.
#pragma once

#include <cstdint>

namespace flashcore::emulator {

enum class Space : std::uint8_t { generic, global, shared, local, param };

inline constexpr int kSpaceShift = 56;
inline constexpr std::uint64_t kSharedWindow = std::uint64_t{1} << kSpaceShift;
inline constexpr std::uint64_t kLocalWindow = std::uint64_t{2} << kSpaceShift;
inline constexpr std::uint64_t kParamWindow = std::uint64_t{3} << kSpaceShift;

/// The system reserves the first KiB of shared memory, as on real GPUs.
inline constexpr std::uint32_t kSharedBase = 1024;
/// Addresses of CTA r of the cluster have r + 1 above this bit, own ones may have 0.
inline constexpr int kRankShift = 24;

}  // namespace flashcore::emulator
