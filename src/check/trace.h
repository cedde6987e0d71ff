// One row of a kernel, tile by tile, beside the oracle.
//
// Measured: the LSE, out and (by one-hot V) the tile's P after each tile, by runs in which the keys
// end there (used_k) while every position and the plan stay the same; from the workspace where keys
// are split. Computed from these: a score is log(P) + LSE, the running maximum is the largest score
// so far, the running sum exp(LSE - maximum). Sinks are left out: a kernel adds them after the last
// tile.
#pragma once

#include <vector>

#include "check/call_runner.h"
#include "verify/inputs/compare.h"

namespace flashcore::verify {

/// The kernel's value and the oracle's.
struct Pair {
  double got = 0, want = 0;
};

struct TracedKey {
  std::int64_t key = 0;
  Pair score;        ///< -inf: hidden
  Pair probability;  ///< normalised over the keys of the split up to this tile
};

/// The state after a tile, over the keys of its split so far.
struct TracedTile {
  std::int64_t split = 0, begin = 0, end = 0;  ///< keys begin <= j < end
  Pair max, sum, lse;
  double lse_bound = 0;
  std::vector<double> out, want_out, out_bounds;  ///< [v_dim], normalised over the keys so far
  std::vector<TracedKey> keys;

  /// Largest error over bound of lse and out; infinity where one is wrongly (not) finite.
  double worst_ratio() const;
  /// Column of out with the largest error over bound.
  std::size_t worst_column() const;
};

struct Trace {
  reference::RowId row{};
  Plan plan;
  std::vector<TracedTile> tiles;
  bool ok() const;
};

Result<Trace> trace_row(CallRunner& runner, const HostCall& call, reference::RowId row);

}  // namespace flashcore::verify
