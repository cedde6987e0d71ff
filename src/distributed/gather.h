// Schemes "gather" and "halo".
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "distributed/schemes.h"

namespace flashcore::distributed {

/// The keys and values that a rank's rows see.
class GatheredKeys {
 public:
  GatheredKeys(const Job& job, const Engine& engine, Local& local);
  Status reserve();
  Status receive(const Shards& shards);
  /// The rows that keys() holds.
  const Spans& needed() const noexcept { return needed_; }
  KeyBlock keys() const;

 private:
  const Job& job_;
  const Engine& engine_;
  Local& local_;
  const Spans needed_;
  bool whole_;  ///< every rank receives every row: an all-gather serves
  std::vector<Spans> sent_, received_;
  std::vector<std::size_t> send_bytes_, recv_bytes_;
  Buffer send_, recv_, memory_;
};

/// Attends each piece of a rank's queries to all keys that it sees. `held` are the rows of the
/// keys.
Status attend_to_all(const Job& job, std::int32_t rank, Local& local, const Shards& shards,
                     const KeyBlock& keys, const Spans& held);

Status run_gather(const Job& job, const Engine& engine, Local& local, const Shards& shards);

/// The gradients of a rank's queries over all keys that they see: one call for each piece.
class AllKeysBackward {
 public:
  /// `held` are the rows of the keys.
  AllKeysBackward(const Job& job, std::int32_t rank, Local& local, const Shards& shards,
                  const Gradients& gradients, Spans held);
  Status reserve();
  /// Writes dq, and dK and dV to sums().
  Status run(const KeyBlock& keys);
  /// f32.
  KeyBlock sums() const;

 private:
  const Job& job_;
  Local& local_;
  const Shards& shards_;
  const Gradients& gradients_;
  const Spans q_, held_;
  std::vector<Span> seen_;  ///< the keys of each piece
  Starts starts_;
  std::vector<std::size_t> positions_;  ///< of each piece in starts_
  Buffer sums_, term_, workspace_;
};

/// K and V are gathered again. Each rank sends dK and dV to the ranks of the keys, which add them
/// in order of ranks.
class GatherBackward {
 public:
  GatherBackward(const Job& job, const Engine& engine, Local& local, const Shards& shards,
                 const Gradients& gradients);
  Status reserve();
  Status run();

 private:
  /// Sums dK and dV of this rank's keys over all ranks.
  Status exchange() const;

  const Job& job_;
  const Engine& engine_;
  Local& local_;
  const Shards& shards_;
  const Gradients& gradients_;
  GatheredKeys keys_;
  AllKeysBackward all_keys_;
  Buffer send_, recv_, own_;
};

}  // namespace flashcore::distributed
