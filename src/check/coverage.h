// Coverage of a set of checked problems: kernels, pairs of options, tile edges. Counts only specs
// and plans that ran.
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

struct Covered {
  std::size_t covered = 0, possible = 0;
  std::vector<std::string> missing;  ///< names of those not covered
};

class Coverage {
 public:
  /// `kernels`: the kernels under test.
  explicit Coverage(std::vector<const KernelInfo*> kernels);

  void add(const CaseSpec& spec, const Plan& plan, const WorkFacts& facts = {});

  /// Problems per kernel, in the order given.
  std::vector<std::pair<const KernelInfo*, std::int64_t>> per_kernel() const;
  std::int64_t fewest_per_kernel() const;

  /// Every option (features() in case.h), and every compatible pair in one problem. "splits" counts
  /// if the plan has more than one KV split.
  Covered options() const;
  Covered option_pairs() const;

  /// Per kernel and tile size: query rows and keys at a multiple of the tile, one less and one
  /// more. A CPU kernel has one KV tile size per row of its tuning table.
  Covered tile_edges() const;

  /// Per persistent kernel: the tile sequences that its CTAs were certain to process (WorkFacts).
  Covered work_lists() const;

 private:
  using Pair = std::pair<std::string, std::string>;

  bool possible(const std::string& a, const std::string& b) const;

  std::vector<const KernelInfo*> kernels_;
  std::map<const KernelInfo*, std::int64_t> problems_;
  std::set<std::string> options_;
  std::set<Pair> pairs_;
  std::set<std::string> edges_, lists_;  ///< names as reported
};

}  // namespace flashcore::verify
