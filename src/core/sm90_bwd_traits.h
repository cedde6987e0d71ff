// The shape of a Hopper kernel for gradients. The kernel reads it, and so does the planner, which
// needs no CUDA. The operands are called as in core/backward_tiles.h's kernels:
//
//            A1   A2   B1   B2   S = A1 B1ᵀ, dP = A2 B2ᵀ
//   dkdv     K    V    Q    dO   a work tile keeps A, 128 keys, and steps through B
//   dq       Q    dO   K    V    the same with 128 query rows
#pragma once

#include <cstdint>

namespace flashcore::core {

inline constexpr int kBwdTileRows = 128;  // of A: 64 for each consumer warpgroup
inline constexpr int kBwdConsumers = 2;   // warpgroups

struct Sm90BwdTraits {
  int head_dim;          // largest head_dim and v_dim
  int plain_stages;      // of the steps of a dkdv tile, without options
  bool options = false;  // score modifications need registers: steps have half the rows

  /// Bytes of rows of an operand, in panels of 128 bytes a row.
  constexpr int tile_bytes(int rows) const { return rows * 128 * ((head_dim + 63) / 64); }
  /// Query rows of a step of a dkdv tile. S, dP, dK and dV of a step fill the registers: 128 rows
  /// fit if dK and dV have 64 columns.
  constexpr int dkdv_step() const { return (head_dim <= 64 ? 128 : 64) / (options ? 2 : 1); }
  constexpr int dkdv_stages() const { return plain_stages * (options ? 2 : 1); }
  /// Keys of a step of a dq tile.
  constexpr int dq_step() const { return options ? 64 : 128; }
  constexpr int box_rows() const { return options ? 32 : 64; }  // of a TMA load
  /// The steps of both kinds share memory: B1 and B2 of each stage.
  constexpr int ring_bytes() const { return dkdv_stages() * 2 * tile_bytes(dkdv_step()); }
  constexpr int dq_stages() const { return ring_bytes() / (2 * tile_bytes(dq_step())); }
  constexpr int threads() const { return 128 * (1 + kBwdConsumers); }
  /// Registers of a thread after setmaxnreg: the producer warpgroup gives some to the consumers.
  constexpr int consumer_registers() const { return 232; }
  constexpr int producer_registers() const { return 40; }
};

}  // namespace flashcore::core
