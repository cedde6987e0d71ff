// CTAs that leave the results of split KV in the workspace, and the last of which joins them, as a
// model: the role of core/sm80_roles.h, one fiber for each warp. The model follows who can see what
// has been written: a CTA's barrier passes it on within the CTA, the counter between CTAs.
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

/// Items whose keys are cut into the same number of ranges. Short sequences have none in the last.
struct SplitProblem {
  int splits, keys_per_split;
  bool is_varlen;
  struct WorkTile {
    int rows, kv_len;
  };
  std::vector<WorkTile> items;

  int joined_splits(const WorkTile& item) const {
    return is_varlen ? core::splits_with_keys(item.kv_len, core::make_fast_divmod(keys_per_split))
                     : splits;
  }
  /// Ranges with keys are joined, and no others but the first.
  void check_ranges(const WorkTile& item) const {
    const int joined = joined_splits(item);
    for (int split = 1; split <= splits; ++split) {
      const bool has_keys =
          split < splits && !core::split_keys(split, keys_per_split, item.kv_len).empty();
      if (is_varlen && has_keys != (split < joined)) {
        throw Violation{std::to_string(joined) + " ranges are joined; range " +
                        std::to_string(split) + (has_keys ? " has keys" : " has none")};
      }
    }
  }
  std::string words() const {
    std::string words = std::to_string(splits) + " splits of " + std::to_string(keys_per_split);
    for (const WorkTile& item : items) {
      words += "; " + std::to_string(item.rows) + " rows, " + std::to_string(item.kv_len) + " keys";
    }
    return words;
  }
};

/// Results of 32 threads, four columns each, in the workspace.
struct Written {
  int cta = -1;     // who wrote it
  int syncs = -1;   // that the writing warp had passed
  int counted = 0;  // which count published it; 0: none
};

struct SplitItem {
  int rows, splits, ranges;  // of the launch, and those that are joined
  std::uint32_t counter = 0;
  int counts = 0;                             // so far
  std::vector<std::vector<Written>> results;  // [split][group of 32 threads]
  std::vector<int> joined;                    // times, of each row
};

struct SplitCta {
  SplitItem& item;
  int split;
  NamedBarrier barrier;
  bool last = false;
  int counted_at = -1;  // syncs that the counting warp had passed
  int sees = 0;         // counts up to this one
};

template <core::Sm80Traits kShape>
struct ModelSplitWarp {
  static constexpr int kThreads = kShape.threads;
  static constexpr int kRowPieces = kShape.head_dim / 4;
  Fibers& fibers;
  InjectedFault fault;
  SplitCta& cta;
  int warp;
  int syncs = 0;

  std::vector<Written>& results(int split) const {
    return cta.item.results[static_cast<std::size_t>(split)];
  }

  /// The warp's share of the CTA's results.
  void store_output() const {
    for (int first = 32 * warp; first < rows() * kRowPieces; first += kThreads) {
      fibers.may_pause();
      Written& written = results(cta.split)[static_cast<std::size_t>(first / 32)];
      if (written.cta >= 0) throw Violation{"a partial result is written twice"};
      written = {cta.split, syncs, 0};
    }
  }

  bool has_fault(InjectedFault bug) const { return fault == bug; }
  bool has_first_thread() const { return warp == 0; }
  int index() const { return warp; }
  int splits() const { return cta.item.ranges; }
  int rows() const { return cta.item.rows; }

  void sync_cta() {
    cta.barrier.sync(fibers);
    ++syncs;
  }
  /// Publishes what warps wrote before a barrier that this one has passed too, and sees what all
  /// earlier counts have published.
  std::uint32_t count(int wraps_at) {
    fibers.may_pause();
    cta.sees = ++cta.item.counts;
    for (Written& written : results(cta.split)) {
      if (written.cta == cta.split && written.syncs < syncs) written.counted = cta.sees;
    }
    return count_and_wrap(cta.item.counter, static_cast<std::uint32_t>(wraps_at));
  }
  void set_last(bool last) {
    cta.last = last;
    cta.counted_at = syncs;
  }
  bool is_last() const {
    if (cta.counted_at < 0 || cta.counted_at >= syncs) {
      throw Violation{"reads whether it is last before that is known"};
    }
    return cta.last;
  }

  void combine_row(int row) const {
    fibers.may_pause();
    const int first = row * kRowPieces / 32, last = ((row + 1) * kRowPieces - 1) / 32;
    for (int split = 0; split < splits(); ++split) {
      for (int i = first; i <= last; ++i) {
        const Written& written = results(split)[static_cast<std::size_t>(i)];
        if (written.counted == 0 || written.counted > cta.sees) {
          throw Violation{"row " + std::to_string(row) + " of split " + std::to_string(split) +
                          " is read before it is there"};
        }
      }
    }
    ++cta.item.joined[static_cast<std::size_t>(row)];
  }
};

/// Runs a launch to its end; throws Violation.
template <core::Sm80Traits kShape>
void run_split(const SplitProblem& problem, InjectedFault fault, std::uint64_t seed) {
  Fibers fibers(seed);
  std::deque<SplitItem> items;
  std::deque<SplitCta> ctas;
  constexpr int kWarps = kShape.threads / 32;
  for (const SplitProblem::WorkTile& described : problem.items) {
    problem.check_ranges(described);
    SplitItem& item = items.emplace_back(
        SplitItem{described.rows, problem.splits, problem.joined_splits(described), 0, 0, {}, {}});
    const int groups = (item.rows * kShape.head_dim / 4 + 31) / 32;
    item.results.assign(static_cast<std::size_t>(item.splits),
                        std::vector<Written>(static_cast<std::size_t>(groups)));
    item.joined.resize(static_cast<std::size_t>(item.rows));
    for (int split = 0; split < problem.splits; ++split) {
      if (!core::has_split(item.rows, split, item.ranges)) continue;  // such a CTA counts nowhere
      SplitCta& cta =
          ctas.emplace_back(SplitCta{item, split, {"__syncthreads", kShape.threads}, false, -1, 0});
      for (int warp = 0; warp < kWarps; ++warp) {
        fibers.add("item " + std::to_string(items.size() - 1) + ", split " + std::to_string(split) +
                       ", warp " + std::to_string(warp),
                   [&fibers, &cta, fault, warp] {
                     ModelSplitWarp<kShape> role{fibers, fault, cta, warp};
                     role.store_output();
                     core::finish_split(role);
                   });
      }
    }
  }
  fibers.run();
  for (const SplitItem& item : items) {
    if (item.counter != 0) {
      throw Violation{"a counter is left at " + std::to_string(item.counter)};
    }
    for (std::size_t row = 0; row < item.joined.size(); ++row) {
      if (item.joined[row] != 1) {
        throw Violation{"row " + std::to_string(row) + ": joined " +
                        std::to_string(item.joined[row]) + " times"};
      }
    }
  }
}

}  // namespace flashcore::protocol
