// The shape of a Hopper kernel for gradients. The kernel reads it, and so does the planner, which
// needs no CUDA. The operands are called as in core/backward_tiles.h's kernels:
//
//              A1   A2   B1   B2   S = A1 B1ᵀ, dP = A2 B2ᵀ
//   dkdv       K    V    Q    dO   a work tile keeps A, 128 keys, and steps through B
//   dk, dv     the same for one of the two; dv has no dP and no A2
//   dq         Q    dO   K    V    the same with 128 query rows
//
// Operands 1 have head_dim columns, operands 2 v_dim columns.
#pragma once

#include <cstdint>

#include "core/backward_tiles.h"

namespace flashcore::core {

inline constexpr int kBwdTileRows = 128;  // of A: 64 for each consumer warpgroup
inline constexpr int kBwdConsumers = 2;   // warpgroups

/// Rows of B of a step. S and dP of a step and the sums of a work tile fill the registers.
struct BwdStepRows {
  int head_dim;                       // up to
  int queries, keys;                  // of a tile of keys, of a dq tile
  int queries_options, keys_options;  // score modifications need registers
  int box_rows;                       // of a TMA load, without options
};
inline constexpr BwdStepRows kBwdStepRows[] = {
    {64, 128, 128, 64, 64, 64},
    {128, 64, 128, 32, 64, 64},
    {192, 32, 96, 32, 64, 32},
    {256, 64, 64, 32, 32, 64},
};

struct Sm90BwdTraits {
  int head_dim, v_dim;   // largest
  int plain_stages;      // of B1 in a tile of keys, without options
  bool options = false;  // the call has score modifications

  /// The sums of 64 keys, dK and dV, do not fit the registers: each has work tiles of its own.
  constexpr bool splits_dkdv() const { return head_dim > 192; }

  constexpr const BwdStepRows& rows() const {
    int i = 0;
    while (kBwdStepRows[i].head_dim < head_dim) ++i;
    return kBwdStepRows[i];
  }
  /// Query rows of a step of a tile of keys.
  constexpr int query_step() const { return options ? rows().queries_options : rows().queries; }
  /// Keys of a step of a dq tile.
  constexpr int key_step() const { return options ? rows().keys_options : rows().keys; }
  constexpr int step(BackwardOutput kind) const {
    return kind == BackwardOutput::dq ? key_step() : query_step();
  }
  constexpr int box_rows() const { return options ? 32 : rows().box_rows; }  // of a TMA load

  /// Bytes of rows of an operand, in panels of 128 bytes a row.
  static constexpr int tile_bytes(int rows, int columns) {
    return rows * 128 * ((columns + 63) / 64);
  }
  constexpr int a1_bytes() const { return tile_bytes(kBwdTileRows, head_dim); }
  constexpr int a2_bytes() const { return tile_bytes(kBwdTileRows, v_dim); }
  constexpr int b1_bytes(BackwardOutput kind) const { return tile_bytes(step(kind), head_dim); }
  constexpr int b2_bytes(BackwardOutput kind) const { return tile_bytes(step(kind), v_dim); }

  /// Memory of the steps, which all kinds of work tiles share. dv tiles use A2's as well.
  constexpr int ring_bytes() const {
    const int queries = rows().queries, keys = rows().keys, each = splits_dkdv() ? 2 : 1;
    const int of_keys = plain_stages * tile_bytes(queries, head_dim) +
                        plain_stages / each * tile_bytes(queries, v_dim);
    const int of_dq = 2 * tile_bytes(keys, head_dim) + 2 / each * tile_bytes(keys, v_dim);
    return of_keys > of_dq ? of_keys : of_dq;
  }
  constexpr int operand_bytes() const { return a1_bytes() + a2_bytes() + ring_bytes(); }
  constexpr int ring_begin(BackwardOutput kind) const {
    return a1_bytes() + (kind == BackwardOutput::dv ? 0 : a2_bytes());
  }
  /// dk and dq tiles of large head dims have fewer stages of B2, which only dP reads.
  constexpr bool has_fewer_b2_stages(BackwardOutput kind) const {
    return splits_dkdv() && kind != BackwardOutput::dv;
  }
  constexpr int b2_stages(BackwardOutput kind) const {
    const int for_each = has_fewer_b2_stages(kind) ? 2 : 1;
    const int bytes = for_each * b1_bytes(kind) + b2_bytes(kind);
    const int fit = (operand_bytes() - ring_begin(kind)) / bytes;
    int stages = 1;
    while (2 * stages <= fit) stages *= 2;
    return stages;
  }
  constexpr int b1_stages(BackwardOutput kind) const {
    return b2_stages(kind) * (has_fewer_b2_stages(kind) ? 2 : 1);
  }
  /// The first stage of B2, and the distance between stages: B1 and B2 of a stage are adjacent if
  /// they have equally many.
  constexpr int b1_stride(BackwardOutput kind) const {
    return b1_bytes(kind) + (has_fewer_b2_stages(kind) ? 0 : b2_bytes(kind));
  }
  constexpr int b2_begin(BackwardOutput kind) const {
    return ring_begin(kind) + (has_fewer_b2_stages(kind) ? b1_stages(kind) : 1) * b1_bytes(kind);
  }
  constexpr int b2_stride(BackwardOutput kind) const {
    return b2_bytes(kind) + (has_fewer_b2_stages(kind) ? 0 : b1_bytes(kind));
  }

  /// Stages of the steps of all tiles of keys.
  constexpr int query_stages() const {
    if (!splits_dkdv()) return b1_stages(BackwardOutput::dkdv);
    const int dk = b1_stages(BackwardOutput::dk), dv = b1_stages(BackwardOutput::dv);
    return dk > dv ? dk : dv;
  }

  constexpr int threads() const { return 128 * (1 + kBwdConsumers); }
  /// Registers of a thread after setmaxnreg: the producer warpgroup gives some to the consumers.
  constexpr int consumer_registers() const { return 232; }
  constexpr int producer_registers() const { return 40; }
};

}  // namespace flashcore::core
