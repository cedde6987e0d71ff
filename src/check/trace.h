// Traces one row of a kernel, KV tile by KV tile, next to the oracle.
//
// Measured after each tile: LSE, out and, with one-hot V, the tile's P. Each measurement is a run
// whose keys end with that tile (used_k), with the same positions and the same plan. With split-KV
// the values come from the workspace. Derived: a score is log(P) + LSE, the running maximum is the
// largest score so far, the running sum is exp(LSE - maximum). The trace has no sinks: a kernel
// adds them after the last tile.
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
  Pair probability;  ///< normalised over the keys of the split up to the end of this tile
};

/// State after a tile, over the keys of its split up to the end of this tile.
struct TracedTile {
  std::int64_t split = 0, begin = 0, end = 0;  ///< keys begin <= j < end
  Pair max, sum, lse;
  double lse_bound = 0;
  std::vector<double> out, want_out, out_bounds;  ///< [v_dim], normalised over those keys
  std::vector<TracedKey> keys;

  /// Largest error / bound of lse and out; infinity if a value is finite on one side only.
  double worst_ratio() const;
  /// Column of out with the largest error / bound.
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
