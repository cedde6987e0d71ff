// A launch of a Hopper kernel as its synchronisation sees it: the pieces of work, who gets them,
// and what has been written.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "barriers.h"
#include "core/sm90_work_tile.h"
#include "verify/inputs/random.h"

namespace flashcore::protocol {

/// A sequence of the batch.
struct ModelSequence {
  std::int32_t q_len;
  core::Mask mask;
};

/// What the roles are driven by: made of the functions that drive the kernels.
struct ModelProblem {
  core::Sm90Traits shape;
  std::vector<ModelSequence> sequences;
  core::TileScheduler order;
  core::PackGqa heads{};
  core::Tail tail;
  std::int32_t blocks;
  bool dirty_tail;  // V rows past the last key are zero-filled

  std::int32_t num_scheduled() const { return core::num_scheduled(order, tail); }
};

/// Problems with few keys and many items: sequences of any length beside empty ones, q_len far
/// above kv_len, causal or with windows on either side, rows of several heads in a tile, keys cut
/// into parts where the kernel does so.
ModelProblem draw_problem(const core::Sm90Traits& shape, std::uint64_t seed);

std::string to_string(const ModelProblem& problem);

/// An item as the scheduler describes it. Returns whether it has queries.
bool decode_work_tile(const ModelProblem& problem, std::int32_t piece, core::TileSteps& work);

/// What the CTAs of a launch share.
class Launch {
 public:
  Launch(const ModelProblem& problem, Fibers& fibers);

  const ModelProblem& problem() const { return problem_; }
  Fibers& fibers() const { return fibers_; }

  std::int32_t next_index();
  /// A consumer warp has the output of a piece.
  void write(std::int32_t piece, int warp);
  /// Throws Violation unless every row is written once and all counters are 0 again.
  void check_end() const;

 private:
  int warps() const { return 4 * problem_.shape.consumers(); }

  const ModelProblem& problem_;
  Fibers& fibers_;
  std::uint32_t ticket_ = 0;
  std::vector<std::uint32_t> arrived_;  // of the parts of cut items, for each warp
  std::vector<int> written_;            // of items, for each warp
};

}  // namespace flashcore::protocol
