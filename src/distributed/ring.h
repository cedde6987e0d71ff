// Scheme "ring".
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "distributed/schemes.h"

namespace flashcore::distributed {

/// The ranks of the engine that take part in a job: `first`, `first + stride`, ...
struct Members {
  std::int32_t rank = 0;  ///< this rank's place among them
  std::int32_t first = 0, stride = 1;

  std::int32_t global(std::int32_t place) const noexcept { return first + place * stride; }
};

/// A pair of pieces of which the first sees keys of the second, and the step that has both.
struct VisiblePair {
  std::int32_t step;
  std::size_t q, k;
  std::size_t starts;
};

/// The way of the blocks of K and V, as one place of the ring sees it.
class RingWalk {
 public:
  RingWalk(const Job& job, const Members& members, const Engine& engine);

  /// The block that this place holds at a step.
  std::int32_t block(std::int32_t step) const noexcept;
  std::int64_t rows_at(std::int32_t step) const { return rows_of(job_.k_of(block(step))); }
  /// How far a block goes.
  std::int32_t hops(std::int32_t block) const { return hops_[static_cast<std::size_t>(block)]; }
  std::vector<VisiblePair> visible_pairs(Starts& starts) const;

  /// Memory for any block; `wide`: of f32.
  Status reserve(Local& local, Buffer& buffer, bool wide) const;
  /// Copies this place's own K and V.
  Status begin(Local& local, const Shards& shards, const Buffer& to) const;
  /// Sends what this place holds at `step`, and receives what it holds at the next.
  Status pass_on(std::int32_t step, const char* what, bool wide, const Buffer& held,
                 const Buffer& next) const;

 private:
  const Job& job_;
  const Members members_;
  const Engine& engine_;
  std::vector<std::int32_t> hops_;
};

Status run_ring(const Job& job, const Members& members, const Engine& engine, Local& local,
                const Shards& shards);

/// K and V travel again. The sums dK and dV of a block follow one step behind, because each place
/// adds to them after its computation, and go home from the last place.
class RingBackward {
 public:
  RingBackward(const Job& job, const Members& members, const Engine& engine, Local& local,
               const Shards& shards, const Gradients& gradients);
  Status reserve();
  Status run();

 private:
  static Buffer& held(std::array<Buffer, 2>& buffers, std::int32_t step) noexcept {
    return buffers[static_cast<std::size_t>(step % 2)];
  }
  Status compute(std::int32_t step);
  /// Keeps the sums of a block that goes no further.
  Status keep_finished(std::int32_t step);
  /// Of the sums that this place sends home to another.
  std::int64_t finished_bytes(std::int32_t block) const;
  Status send_home() const;

  const Job& job_;
  const Members members_;
  const Engine& engine_;
  Local& local_;
  const Shards& shards_;
  const Gradients& gradients_;
  const RingWalk walk_;
  const Spans q_;
  Starts starts_;
  std::vector<VisiblePair> pairs_;
  std::array<Buffer, 2> blocks_, sums_;
  Buffer dq_, own_, finished_;             // f32 sums
  Buffer dq_term_, dkv_term_, workspace_;  // of one call
};

}  // namespace flashcore::distributed
