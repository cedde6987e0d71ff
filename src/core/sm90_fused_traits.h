// The shape of a fused Hopper kernel for gradients (core/sm90_fused_roles.h). The planner reads it,
// so it includes nothing.
#pragma once

namespace flashcore::core {

inline constexpr int kFusedTileRows = 128;  // keys of a work tile: 64 for each of two warpgroups
inline constexpr int kFusedStepRows = 64;   // query rows of a step, and of a dQ tile
/// Stages of Q and dO. The slots of dZ and dQ are those of the stage.
inline constexpr int kFusedStages = 2;

struct Sm90FusedTraits {
  int head_dim;  // largest head_dim and v_dim

  // As of Sm90BwdTraits.
  static constexpr bool splits_dkdv() { return false; }
  static constexpr int query_step() { return kFusedStepRows; }
  static constexpr int key_step() { return kFusedStepRows; }
  static constexpr int box_rows() { return kFusedStepRows; }
  static constexpr int threads() { return 3 * 128; }
  static constexpr int consumer_registers() { return 232; }
  static constexpr int producer_registers() { return 40; }
};

}  // namespace flashcore::core
