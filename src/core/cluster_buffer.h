// The exchange of partial results in a cluster whose CTAs combine split KV: sender and receiver of
// each part, its location in the receiver's shared memory, and the bytes that a receiver expects.
// The kernels (cuda/sm80/cluster_combine.cuh, cluster_combine_warps.cuh), the planner and the model
// (tests/protocol) read it.
#pragma once

#include "core/config.h"

namespace flashcore::core {

/// The buffer follows SharedStorage: mbarriers, outputs, then row statistics (maximum and sum).
/// The unit of exchange is a vec4, four columns of a row; 32 of them are a chunk. The CTAs of a
/// cluster combine the chunks of a work tile in passes; a pass has one chunk for each CTA.
///
/// Either CTAs send, each vec4 with its row's statistics. Or, for tiles of 8 rows, warps send, with
/// one set of statistics for each row.
struct ClusterBuffer {
  static constexpr int kChunk = 32;                                 // vec4s
  static constexpr int kOutBytes = 16;                              // of a vec4
  static constexpr int kRowStatsBytes = 8;                          // maximum and sum
  static constexpr int kMessageBytes = kOutBytes + kRowStatsBytes;  // a vec4 from a CTA
  static constexpr int kBarrierBytes = 16;                          // at the front
  static constexpr int kMaxSplits = 8;      // portable cluster size of sm_90
  static constexpr int kWarpColumns = 512;  // limit on rows * head_dim for sends by warps

  /// Limit on the chunks that a CTA receives if each split has one sender: passes × splits.
  static constexpr int chunks(int rows, int head_dim) {
    return (rows * head_dim / 4 + kChunk - 1) / kChunk + kMaxSplits - 1;
  }
  /// Warps send the results of work tiles with at most this many rows.
  static constexpr int rows_from_warps(int tile_rows, int head_dim) {
    const int rows = tile_rows == 8 ? kWarpColumns / head_dim : 0;
    return rows < tile_rows ? rows : tile_rows;
  }

  /// Byte offsets in the buffer.
  struct Layout {
    int outputs, row_stats, end;
  };
  static constexpr Layout layout_of_ctas(int tile_rows, int head_dim) {
    const int vec4s = chunks(tile_rows, head_dim) * kChunk;
    const int row_stats = kBarrierBytes + vec4s * kOutBytes;
    return {kBarrierBytes, row_stats, row_stats + vec4s * kRowStatsBytes};
  }
  static constexpr Layout layout_of_warps(int tile_rows, int head_dim, int warps_n) {
    const int rows = rows_from_warps(tile_rows, head_dim);
    const int vec4s = warps_n * chunks(rows, head_dim) * kChunk;
    const int row_stats = kBarrierBytes + vec4s * kOutBytes;
    return {kBarrierBytes, row_stats, row_stats + 4 * vec4s / head_dim * kRowStatsBytes};
  }
  static constexpr int bytes(int tile_rows, int head_dim, int threads) {
    const int of_ctas = layout_of_ctas(tile_rows, head_dim).end;
    if (tile_rows != 8) return of_ctas;
    const int of_warps = layout_of_warps(tile_rows, head_dim, threads / 32).end;
    return of_warps > of_ctas ? of_warps : of_ctas;
  }
};

/// The mbarriers of a buffer. Each has one phase: thread 0 arrives with the expected bytes.
enum class BufferBarrier : int {
  vec4s,      // from CTAs: outputs and row statistics
  row_stats,  // from warps
  outputs,    // from warps
};
inline constexpr int kBufferArrivals = 1;
inline constexpr int kMaxExpectedBytes = (1 << 20) - 1;  // limit of an mbarrier

/// Index of the barrier among the two at the front of the buffer.
FLASHCORE_HD constexpr int mbarrier_index(BufferBarrier barrier) {
  return barrier == BufferBarrier::outputs ? 1 : 0;
}

/// The CTA that combines the n-th chunk of a pass; and, as its own inverse, the chunk that CTA n
/// combines. The last CTA gets the first chunk, because its split may be the shortest.
FLASHCORE_HD constexpr int chunk_owner(int splits, int n) { return splits - 1 - n; }

/// A slot of CTA `rank`'s buffer, for a vec4 or for a row's statistics.
struct ClusterSlot {
  int rank, index;
};

/// Slot of the `lane`-th vec4 that CTA `sender` sends in a pass.
FLASHCORE_HD constexpr int vec4_slot(int pass, int splits, int sender, int lane) {
  return (pass * splits + sender) * ClusterBuffer::kChunk + lane;
}

/// Destination of a vec4 that CTA `sender` sends.
FLASHCORE_HD constexpr ClusterSlot peer_slot_of_vec4(int vec4, int splits, int sender) {
  const int chunk = vec4 / ClusterBuffer::kChunk, pass = chunk / splits;
  return {chunk_owner(splits, chunk - pass * splits),
          vec4_slot(pass, splits, sender, vec4 % ClusterBuffer::kChunk)};
}

/// The `lane`-th vec4 of the work tile that CTA `rank` combines in a pass; the CTA has none left if
/// it is past the last one.
FLASHCORE_HD constexpr int combined_vec4(int pass, int splits, int rank, int lane) {
  return (pass * splits + chunk_owner(splits, rank)) * ClusterBuffer::kChunk + lane;
}

/// The number of a work tile's vec4s that CTA `rank` combines.
FLASHCORE_HD constexpr int vec4s_to_combine(int vec4s, int splits, int rank) {
  int mine = 0;
  for (int first = combined_vec4(0, splits, rank, 0); first < vec4s;
       first += splits * ClusterBuffer::kChunk) {
    mine += vec4s - first < ClusterBuffer::kChunk ? vec4s - first : ClusterBuffer::kChunk;
  }
  return mine;
}

/// Slots of the partial results that warps send: whole rows of a chunk.
template <int kHeadDim, int kWarpsN_>
struct WarpPartials {
  static constexpr int kWarpsN = kWarpsN_;
  static constexpr int kRowVec4s = kHeadDim / 4;
  static constexpr int kChunkRows = ClusterBuffer::kChunk / kRowVec4s;

  /// Index of the partial chunk that a warp of CTA `sender` sends. A partial chunk has kChunkRows
  /// row statistics and kChunk vec4s.
  static FLASHCORE_HD constexpr int partial_index(int pass, int splits, int sender, int warp_n) {
    return (pass * splits + sender) * kWarpsN + warp_n;
  }
  /// Destination of a row's statistics from a warp of CTA `sender`. The row's vec4s begin at slot
  /// index * kRowVec4s.
  static FLASHCORE_HD constexpr ClusterSlot peer_slot_of_row(int row, int splits, int sender,
                                                             int warp_n) {
    const int chunk = row / kChunkRows, pass = chunk / splits;
    return {chunk_owner(splits, chunk - pass * splits),
            partial_index(pass, splits, sender, warp_n) * kChunkRows + row % kChunkRows};
  }
};

/// Bytes that a barrier expects if the CTA combines `vec4s` of the work tile.
template <BufferBarrier kBarrier>
FLASHCORE_HD constexpr int expected_bytes(int vec4s, int row_vec4s, int splits, int warps_n,
                                          bool one_short) {
  const int unit = kBarrier == BufferBarrier::vec4s       ? ClusterBuffer::kMessageBytes
                   : kBarrier == BufferBarrier::row_stats ? ClusterBuffer::kRowStatsBytes
                                                          : ClusterBuffer::kOutBytes;
  const int senders = kBarrier == BufferBarrier::vec4s ? splits : splits * warps_n;
  const int sent = (kBarrier == BufferBarrier::row_stats ? vec4s / row_vec4s : vec4s) * senders;
  return (one_short && sent > 0 ? sent - 1 : sent) * unit;
}

}  // namespace flashcore::core
