// Score modifications of a call, as bits.
#pragma once

#include <cstdint>

namespace flashcore::core {

/// Modifications beyond a positive scale and a mask by position.
enum ScoreMods : std::uint8_t {
  kElementMods = 1,          // of single scores (core/score.h): softcap, ALiBi, bias
  kMaskMod = 2,              // a boolean mask
  kNonPositiveScaleMod = 4,  // the row maximum cannot be found before scaling
  kBlockScalesMod = 8,       // 8-bit rows of a head have several scales
};

}  // namespace flashcore::core
