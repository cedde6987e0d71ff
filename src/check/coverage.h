// What a set of checked problems has covered: kernels, pairs of options, tile edges. Counted from
// the specs and plans that really ran, so that "everything was tested" is a figure, not a hope.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check/work_facts.h"
#include "flashcore/plan.h"
#include "verify/inputs/case.h"

namespace flashcore::verify {

/// Some of a known set.
struct Covered {
  std::size_t covered = 0, possible = 0;
  std::vector<std::string> missing;  ///< by name
};

class Coverage {
 public:
  /// `kernels` are those that were to be checked.
  explicit Coverage(std::vector<const KernelInfo*> kernels);

  void add(const CaseSpec& spec, const Plan& plan, const WorkFacts& facts = {});

  /// Problems per kernel, in the order given.
  std::vector<std::pair<const KernelInfo*, std::int64_t>> per_kernel() const;
  std::int64_t fewest_per_kernel() const;

  /// Every option (features() in case.h) and every two of them in one problem, except those that
  /// exclude each other. "splits" counts where the plan really had more than one key range.
  Covered options() const;
  Covered option_pairs() const;

  /// Per kernel and tile size: lengths of a multiple of the tile and one less and one more, of
  /// query rows and of keys. A CPU kernel has one key tile per row of its tuning table.
  Covered tile_edges() const;

  /// Per persistent kernel: what its blocks' lists of items were certain to have (WorkFacts). Where
  /// no kernel is persistent there is nothing to cover.
  Covered work_lists() const;

 private:
  using Pair = std::pair<std::string, std::string>;

  bool possible(const std::string& a, const std::string& b) const;

  std::vector<const KernelInfo*> kernels_;
  std::map<const KernelInfo*, std::int64_t> problems_;
  std::set<std::string> options_;
  std::set<Pair> pairs_;
  std::set<std::string> edges_, lists_;  ///< by the names under which missing ones are reported
};

}  // namespace flashcore::verify
