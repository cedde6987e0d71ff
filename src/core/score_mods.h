// Score modifications of a call, as bits.
#pragma once

#include <cstdint>

namespace flashcore::core {

/// Modifications beyond a positive scale and a mask by position.
enum ScoreMods : std::uint8_t {
  kSoftcapMod = 1,
  kAlibiMod = 2,
  kBiasMod = 4,
  kMaskMod = 8,
  kNonPositiveScaleMod = 16,  // the row maximum cannot be found before scaling
  kBlockScalesMod = 32,       // 8-bit rows of a head have several scales
};

/// Modifications of single scores: core/score.h.
inline constexpr std::uint8_t kElementMods = kSoftcapMod | kAlibiMod | kBiasMod | kMaskMod;

}  // namespace flashcore::core
