// The forward and the backward call of one case on all ranks, as threads, judged by the oracle.
#pragma once

#include "support/backward.h"
#include "unit/distributed/sharded.h"
#include "unit/distributed/thread_comm.h"

namespace flashcore::test {

class Ranks {
 public:
  bool in_c = false;  ///< calls go through the C ABI

  Ranks(const Case& c, std::int32_t ranks, const DistributedOptions& how);

  bool possible() const { return choose_scheme(problem_).ok(); }
  /// Runs the forward and checks values and bytes. The result has out and lse of the whole
  /// sequence.
  const Output& forward();
  /// forward(), and then the gradients: values, bytes, and the bits of two equal calls.
  void check();

 private:
  bool packed() const { return !case_.documents.empty(); }
  std::int32_t ranks() const { return static_cast<std::int32_t>(q_.rows.size()); }
  int rows_axis() const { return packed() ? 0 : 2; }
  int lse_axis() const { return packed() ? 1 : 2; }

  /// The call of one rank.
  Differentiated shard(std::int32_t rank) const;
  void backward();
  void check_bytes(const ThreadComm& engine, bool backward) const;

  const Case& case_;
  DistributedOptions how_;
  Placement q_, k_;
  std::vector<std::int64_t> documents_;
  DistributedProblem problem_;
  Output output_;  ///< of the whole sequence: first of one call, then of the ranks
  Differentiated whole_;
};

}  // namespace flashcore::test
