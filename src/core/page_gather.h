// How warps share the rows of a KV tile whose pages are too small for TMA boxes
// (cuda/sm90/page_gatherer.cuh). A copy of a warp has 16 bytes for each lane: a 128-byte panel of
// four rows. Each lane looks up the pages of a few rows and passes them on by shuffles.
#pragma once

#include "core/config.h"

namespace flashcore::core {

template <int kTileK, int kWarps>
struct PageGather {
  static constexpr int kLanesOfRow = 8, kChunkBytes = 16;
  static constexpr int kRows = 32 / kLanesOfRow;                                    // of a copy
  static constexpr int kCopies = (kTileK + kRows * kWarps - 1) / (kRows * kWarps);  // of a panel
  static constexpr int kLookups = (kCopies * kRows + 31) / 32;                      // of a lane
  static constexpr int kCopiesOfLookup = 32 / kRows;  // whose rows the lanes look up together

  /// The row that a lane copies. The last copies of some warps are past the tile.
  FLASHCORE_HD static constexpr int copied_row(int warp, int lane, int copy) {
    return kRows * (kWarps * copy + warp) + lane / kLanesOfRow;
  }
  /// The row whose page a lane looks up.
  FLASHCORE_HD static constexpr int looked_up_row(int warp, int lane, int lookup) {
    return kRows * (kWarps * (lane / kRows + kCopiesOfLookup * lookup) + warp) + lane % kRows;
  }
  /// The lane that has looked up the page of copied_row(), in lookup copy / kCopiesOfLookup.
  FLASHCORE_HD static constexpr int source_lane(int lane, int copy) {
    return (kRows * copy + lane / kLanesOfRow) % 32;
  }
};

}  // namespace flashcore::core
