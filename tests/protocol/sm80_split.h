// Model of CTAs that store partial results of KV splits in the workspace, where the last CTA
// combines them: the role of core/sm80_roles.h, one fiber for each warp. The model tracks the
// visibility of writes: a CTA barrier publishes them within the CTA, the counter between CTAs.
#pragma once

#include <algorithm>
#include <deque>
#include <string>
#include <vector>

#include "barriers.h"
#include "core/mask.h"
#include "core/sm80_roles.h"
#include "core/sm80_traits.h"

namespace flashcore::protocol {

using core::InjectedFault;

/// Work tiles with the same number of KV splits. Short sequences have no keys in the last splits.
struct SplitProblem {
  int splits, keys_per_split;
  bool is_varlen;
  struct WorkTile {
    int rows, kv_len;
  };
  std::vector<WorkTile> tiles;

  int combined_splits(const WorkTile& work) const {
    return is_varlen ? core::splits_with_keys(work.kv_len, core::make_fast_divmod(keys_per_split))
                     : splits;
  }
  /// Throws unless exactly the first split and every split with keys are combined.
  void check_splits(const WorkTile& work) const {
    const int combined = combined_splits(work);
    for (int split = 1; split <= splits; ++split) {
      const bool has_keys =
          split < splits && !core::split_keys(split, keys_per_split, work.kv_len).empty();
      if (is_varlen && has_keys != (split < combined)) {
        throw Violation{std::to_string(combined) + " splits are combined; split " +
                        std::to_string(split) + (has_keys ? " has keys" : " has none")};
      }
    }
  }
  std::string describe() const {
    std::string text = std::to_string(splits) + " splits of " + std::to_string(keys_per_split);
    for (const WorkTile& work : tiles) {
      text += "; " + std::to_string(work.rows) + " rows, " + std::to_string(work.kv_len) + " keys";
    }
    return text;
  }
};

/// Results of 32 threads, four columns each, in the workspace.
struct Written {
  int cta = -1;     // the CTA that wrote it
  int syncs = -1;   // CTA barriers that the writing warp had passed
  int counted = 0;  // the count that published it; 0: not published
};

struct SplitTile {
  int rows, splits, combined_splits;
  std::uint32_t counter = 0;
  int counts = 0;                             // so far
  std::vector<std::vector<Written>> results;  // [split][group of 32 threads]
  std::vector<int> combined;                  // number of combinations of each row
};

struct SplitCta {
  SplitTile& tile;
  int split;
  NamedBarrier barrier;
  bool last = false;
  int counted_at = -1;  // syncs that the counting warp had passed
  int sees = 0;         // counts up to this one
};

template <core::Sm80Traits kShape>
struct ModelSplitWarp {
  static constexpr int kThreads = kShape.threads;
  static constexpr int kRowVec4s = kShape.head_dim / 4;
  Fibers& fibers;
  InjectedFault fault;
  SplitCta& cta;
  int warp;
  int syncs = 0;

  std::vector<Written>& results(int split) const {
    return cta.tile.results[static_cast<std::size_t>(split)];
  }

  /// Stores the results of this warp.
  void store_output() const {
    for (int first = 32 * warp; first < rows() * kRowVec4s; first += kThreads) {
      fibers.may_pause();
      Written& written = results(cta.split)[static_cast<std::size_t>(first / 32)];
      if (written.cta >= 0) throw Violation{"a partial result is written twice"};
      written = {cta.split, syncs, 0};
    }
  }

  bool has_fault(InjectedFault wanted) const { return fault == wanted; }
  bool has_first_thread() const { return warp == 0; }
  int index() const { return warp; }
  int splits() const { return cta.tile.combined_splits; }
  int rows() const { return cta.tile.rows; }

  void sync_cta() {
    cta.barrier.sync(fibers);
    ++syncs;
  }
  /// Publishes the writes of this CTA before the last CTA barrier that this warp has passed. Makes
  /// the writes that earlier counts published visible to this CTA.
  std::uint32_t count(int wraps_at) {
    fibers.may_pause();
    cta.sees = ++cta.tile.counts;
    for (Written& written : results(cta.split)) {
      if (written.cta == cta.split && written.syncs < syncs) written.counted = cta.sees;
    }
    return count_and_wrap(cta.tile.counter, static_cast<std::uint32_t>(wraps_at));
  }
  void set_last(bool last) {
    cta.last = last;
    cta.counted_at = syncs;
  }
  bool is_last() const {
    if (cta.counted_at < 0 || cta.counted_at >= syncs) {
      throw Violation{"reads is_last() before it is known"};
    }
    return cta.last;
  }

  void combine_row(int row) const {
    fibers.may_pause();
    const int first = row * kRowVec4s / 32, last = ((row + 1) * kRowVec4s - 1) / 32;
    for (int split = 0; split < splits(); ++split) {
      for (int i = first; i <= last; ++i) {
        const Written& written = results(split)[static_cast<std::size_t>(i)];
        if (written.counted == 0 || written.counted > cta.sees) {
          throw Violation{"row " + std::to_string(row) + " of split " + std::to_string(split) +
                          " is read before it is visible"};
        }
      }
    }
    ++cta.tile.combined[static_cast<std::size_t>(row)];
  }
};

/// Runs a launch to its end. Throws Violation.
template <core::Sm80Traits kShape>
void run_split(const SplitProblem& problem, InjectedFault fault, std::uint64_t seed) {
  Fibers fibers(seed);
  std::deque<SplitTile> tiles;
  std::deque<SplitCta> ctas;
  constexpr int kWarps = kShape.threads / 32;
  for (const SplitProblem::WorkTile& described : problem.tiles) {
    problem.check_splits(described);
    SplitTile& tile = tiles.emplace_back(SplitTile{
        described.rows, problem.splits, problem.combined_splits(described), 0, 0, {}, {}});
    const int groups = (tile.rows * kShape.head_dim / 4 + 31) / 32;
    tile.results.assign(static_cast<std::size_t>(tile.splits),
                        std::vector<Written>(static_cast<std::size_t>(groups)));
    tile.combined.resize(static_cast<std::size_t>(tile.rows));
    for (int split = 0; split < problem.splits; ++split) {
      // A CTA without a split does not count.
      if (!core::has_split(tile.rows, split, tile.combined_splits)) continue;
      SplitCta& cta =
          ctas.emplace_back(SplitCta{tile, split, {"__syncthreads", kShape.threads}, false, -1, 0});
      for (int warp = 0; warp < kWarps; ++warp) {
        fibers.add("tile " + std::to_string(tiles.size() - 1) + ", split " + std::to_string(split) +
                       ", warp " + std::to_string(warp),
                   [&fibers, &cta, fault, warp] {
                     ModelSplitWarp<kShape> role{fibers, fault, cta, warp};
                     role.store_output();
                     core::combine_in_last_cta(role);
                   });
      }
    }
  }
  fibers.run();
  for (const SplitTile& tile : tiles) {
    if (tile.counter != 0) {
      throw Violation{"a counter is left at " + std::to_string(tile.counter)};
    }
    for (std::size_t row = 0; row < tile.combined.size(); ++row) {
      if (tile.combined[row] != 1) {
        throw Violation{"row " + std::to_string(row) + ": combined " +
                        std::to_string(tile.combined[row]) + " times"};
      }
    }
  }
}

}  // namespace flashcore::protocol
