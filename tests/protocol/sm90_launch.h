// Model of an sm90 launch: its scheduled tiles, the tile counter, and the number of writes.
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

/// The launch parameters. The functions of core that make them are those of the kernels.
struct ModelProblem {
  core::Sm90Traits shape;
  std::vector<ModelSequence> sequences;
  core::TileScheduler order;
  core::PackGqa heads{};
  core::TailSplit tail;
  std::int32_t num_ctas;
  int producers;           // warps; several for paged KV
  bool gathers;            // they copy rows themselves, and arrive late
  bool dirty_tail;         // V rows past the last key are zero-filled
  bool tiles_from_window;  // plan/kernel_traits.h

  std::int32_t num_scheduled() const { return core::num_scheduled(order, tail); }
};

/// Draws a problem with few keys and many work tiles: sequences of any length, also empty, q_len
/// far above kv_len, causal masks and windows, PackGQA and tail splits if the kernel has them.
ModelProblem draw_problem(const core::Sm90Traits& shape, std::uint64_t seed);

std::string to_string(const ModelProblem& problem);

/// Decodes a work tile as the scheduler does. Returns false if it has no query.
bool decode_work_tile(const ModelProblem& problem, std::int32_t index, core::TileSteps& work);

/// State that the CTAs of a launch share.
class Launch {
 public:
  Launch(const ModelProblem& problem, Fibers& fibers);

  const ModelProblem& problem() const { return problem_; }
  Fibers& fibers() const { return fibers_; }

  std::int32_t next_index();
  /// A consumer warp stores the output of a scheduled tile.
  void write(std::int32_t index, int warp);
  /// Throws Violation unless every row is written once and all counters are 0 again.
  void check_end() const;

 private:
  int warps() const { return 4 * problem_.shape.consumers(); }

  const ModelProblem& problem_;
  Fibers& fibers_;
  std::uint32_t tile_counter_ = 0;
  std::vector<std::uint32_t> tail_arrivals_;  // finished splits of a tail tile, for each warp
  std::vector<int> written_;                  // number of writes of each tile and warp
};

}  // namespace flashcore::protocol
