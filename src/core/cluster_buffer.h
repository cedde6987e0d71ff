// How the CTAs of a cluster join the results of split KV: who sends what to whom, where it lies in
// the receiver's shared memory, and how many bytes the receiver waits for. The kernels
// (cuda/sm80/combine.cuh, warp_join.cuh), the planner and the model (tests/protocol) read it.
#pragma once

#include "core/config.h"

namespace flashcore::core {

/// The inbox lies in shared memory, behind everything else: barriers, outputs, then row states. A
/// piece is four columns of a row, and 32 pieces are a chunk. The CTAs of a cluster join the chunks
/// of an item in turns: a turn has one chunk for each of them.
///
/// Either CTAs send pieces, each with its row's state; or, of tiles of 8 rows, warps send theirs,
/// with one state for each row.
struct ClusterBuffer {
  static constexpr int kChunk = 32;
  static constexpr int kOutBytes = 16;   // a piece: four columns
  static constexpr int kStateBytes = 8;  // maximum and sum
  static constexpr int kPieceBytes = kOutBytes + kStateBytes;
  static constexpr int kBarrierBytes = 16;  // in front
  static constexpr int kMaxSplits = 8;      // what every sm_90 can place
  static constexpr int kWarpColumns = 512;  // of all rows, that warps send

  /// A CTA receives these at most, if each split has one sender: turns × splits.
  static constexpr int chunks(int rows, int head_dim) {
    return (rows * head_dim / 4 + kChunk - 1) / kChunk + kMaxSplits - 1;
  }
  /// Warps send the results of items of so many rows or fewer.
  static constexpr int rows_from_warps(int tile_rows, int head_dim) {
    const int rows = tile_rows == 8 ? kWarpColumns / head_dim : 0;
    return rows < tile_rows ? rows : tile_rows;
  }

  /// Bytes from the start of the inbox.
  struct Layout {
    int outputs, states, end;
  };
  static constexpr Layout layout_of_ctas(int tile_rows, int head_dim) {
    const int pieces = chunks(tile_rows, head_dim) * kChunk;
    const int states = kBarrierBytes + pieces * kOutBytes;
    return {kBarrierBytes, states, states + pieces * kStateBytes};
  }
  static constexpr Layout layout_of_warps(int tile_rows, int head_dim, int warps_n) {
    const int rows = rows_from_warps(tile_rows, head_dim);
    const int pieces = warps_n * chunks(rows, head_dim) * kChunk;
    const int states = kBarrierBytes + pieces * kOutBytes;
    return {kBarrierBytes, states, states + 4 * pieces / head_dim * kStateBytes};
  }
  static constexpr int bytes(int tile_rows, int head_dim, int threads) {
    const int of_ctas = layout_of_ctas(tile_rows, head_dim).end;
    if (tile_rows != 8) return of_ctas;
    const int of_warps = layout_of_warps(tile_rows, head_dim, threads / 32).end;
    return of_warps > of_ctas ? of_warps : of_ctas;
  }
};

/// The mbarriers of an inbox. Each has one phase: thread 0 arrives and announces the bytes.
enum class BufferBarrier : int {
  pieces,   // from CTAs: outputs and states
  states,   // from warps
  outputs,  // from warps
};
inline constexpr int kInboxArrivals = 1;
inline constexpr int kMaxExpectedBytes = (1 << 20) - 1;  // that an mbarrier can count

/// The barrier's index among the two at the front of the inbox.
FLASHCORE_HD constexpr int mbarrier_index(BufferBarrier barrier) {
  return barrier == BufferBarrier::outputs ? 1 : 0;
}

/// The CTA that joins the n-th chunk of a turn. It is its own inverse: CTA n joins this chunk. The
/// last CTA gets the first chunk, because its key range may be the shortest.
FLASHCORE_HD constexpr int chunk_owner(int splits, int n) { return splits - 1 - n; }

/// A place in the inbox of CTA `rank`: of a piece, or of a row.
struct ClusterSlot {
  int rank, index;
};

/// Slots of the `lane`-th piece that CTA `sender` sends in a turn.
FLASHCORE_HD constexpr int piece_slot(int turn, int splits, int sender, int lane) {
  return (turn * splits + sender) * ClusterBuffer::kChunk + lane;
}

/// The recipient, and its slot, of a piece that CTA `sender` sends.
FLASHCORE_HD constexpr ClusterSlot recipient_of_piece(int piece, int splits, int sender) {
  const int chunk = piece / ClusterBuffer::kChunk, turn = chunk / splits;
  return {chunk_owner(splits, chunk - turn * splits),
          piece_slot(turn, splits, sender, piece % ClusterBuffer::kChunk)};
}

/// The `lane`-th piece of the item that CTA `rank` joins in a turn; past the last one: none.
FLASHCORE_HD constexpr int combined_piece(int turn, int splits, int rank, int lane) {
  return (turn * splits + chunk_owner(splits, rank)) * ClusterBuffer::kChunk + lane;
}

/// How many of an item's pieces CTA `rank` joins.
FLASHCORE_HD constexpr int pieces_to_join(int pieces, int splits, int rank) {
  int mine = 0;
  for (int first = combined_piece(0, splits, rank, 0); first < pieces;
       first += splits * ClusterBuffer::kChunk) {
    mine += pieces - first < ClusterBuffer::kChunk ? pieces - first : ClusterBuffer::kChunk;
  }
  return mine;
}

/// Warps send whole rows of a chunk.
template <int kHeadDim, int kKeyWarps_>
struct WarpParts {
  static constexpr int kWarpsN = kKeyWarps_;
  static constexpr int kRowPieces = kHeadDim / 4;
  static constexpr int kChunkRows = ClusterBuffer::kChunk / kRowPieces;

  /// The part of a chunk that a key warp of CTA `sender` sends. Parts have kChunkRows states and
  /// kChunk pieces each.
  static FLASHCORE_HD constexpr int part(int turn, int splits, int sender, int warp_n) {
    return (turn * splits + sender) * kWarpsN + warp_n;
  }
  /// Where a key warp of CTA `sender` sends a row's state. The row's pieces begin at slot
  /// index * kRowPieces.
  static FLASHCORE_HD constexpr ClusterSlot recipient_of_row(int row, int splits, int sender,
                                                             int warp_n) {
    const int chunk = row / kChunkRows, turn = chunk / splits;
    return {chunk_owner(splits, chunk - turn * splits),
            part(turn, splits, sender, warp_n) * kChunkRows + row % kChunkRows};
  }
};

/// The bytes that a barrier of the inbox expects, where the CTA joins `pieces` of the item.
template <BufferBarrier kBarrier>
FLASHCORE_HD constexpr int expected_bytes(int pieces, int row_pieces, int splits, int warps_n,
                                          bool one_short) {
  const int unit = kBarrier == BufferBarrier::pieces   ? ClusterBuffer::kPieceBytes
                   : kBarrier == BufferBarrier::states ? ClusterBuffer::kStateBytes
                                                       : ClusterBuffer::kOutBytes;
  const int senders = kBarrier == BufferBarrier::pieces ? splits : splits * warps_n;
  const int sent = (kBarrier == BufferBarrier::states ? pieces / row_pieces : pieces) * senders;
  return (one_short && sent > 0 ? sent - 1 : sent) * unit;
}

}  // namespace flashcore::core
