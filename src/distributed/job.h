// Job: a distributed problem with its scheme and the spans of all ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "distributed/engine.h"
#include "distributed/mask.h"

namespace flashcore::distributed {

/// Query heads [q_begin, q_end) and the KV heads that they need.
struct HeadRange {
  std::int64_t q_begin, q_end, k_begin, k_end;

  std::int64_t q_heads() const noexcept { return q_end - q_begin; }
  std::int64_t kv_heads() const noexcept { return k_end - k_begin; }
};

struct Job {
  Scheme scheme = Scheme::ring;
  std::int32_t head_ranks = 1;  ///< ranks that divide the heads
  std::string reason;
  std::vector<Spans> q_spans, k_spans;  ///< of each rank
  Mask mask;
  DType dtype = DType::bf16;
  std::int64_t batch = 1, q_heads = 1, kv_heads = 1, head_dim = 1, v_dim = 1;
  bool separate_backward = false;
  bool in_order = false;  ///< batch-invariant: merge in ascending order of keys

  std::int32_t ranks() const noexcept { return static_cast<std::int32_t>(q_spans.size()); }
  const Spans& q_of(std::int32_t rank) const { return q_spans[static_cast<std::size_t>(rank)]; }
  const Spans& k_of(std::int32_t rank) const { return k_spans[static_cast<std::size_t>(rank)]; }
  /// The spans of a rank, each inside one document: what one local call computes.
  Spans q_pieces(std::int32_t rank) const { return cut_at(q_of(rank), mask.q_docs); }
  Spans k_pieces(std::int32_t rank) const { return cut_at(k_of(rank), mask.k_docs); }
  bool is_ring() const noexcept { return scheme != Scheme::gather && scheme != Scheme::halo; }

  /// The first rank of the group that divides heads with this rank.
  std::int32_t group_of(std::int32_t rank) const noexcept { return rank - rank % head_ranks; }
  /// The heads of one member of a group.
  HeadRange heads(std::int32_t member) const noexcept;
  /// The job of the ranks with the same heads, once heads are divided. Its rank r stands for the
  /// whole group r.
  Job one_head_group(std::int32_t rank) const;

  /// Bytes of K and V of these rows. `wide`: in f32 (f64 for f64).
  std::int64_t kv_bytes(std::int64_t rows, bool wide = false) const noexcept;
  /// Bytes of these rows of q in f32.
  std::int64_t wide_q_bytes(std::int64_t rows) const noexcept {
    return batch * q_heads * rows * head_dim * wide_bytes();
  }
  std::int64_t wide_bytes() const noexcept { return dtype == DType::f64 ? 8 : 4; }

  /// For each span of a rank's queries, the keys that it receives. A batch-invariant gather gives
  /// a row all keys from the first on: its bits then do not depend on the number of ranks.
  Spans gathered_keys(std::int32_t rank) const;
  /// The rows of K and V that rank `source` sends to rank `target` in gather and halo.
  Spans message(std::int32_t source, std::int32_t target) const;
  /// Ring: the number of hops of a block to the last rank that sees one of its keys.
  std::int32_t last_hop(std::int32_t block) const;
};

/// Checks the sizes and rows of a problem by themselves.
Status check_problem(const DistributedProblem& problem);
Result<Job> make_job(const DistributedProblem& problem);

/// Checks one tensor of a rank, in q's type (f32 for an LSE), with a contiguous last dimension.
Status check_shard(const char* name, const TensorView& tensor, const TensorView& q, bool required);
/// Checks the tensors of a rank by themselves.
Status check_shards(const Tensors& tensors, const Options& options);
std::vector<HeaderField> header_of(const Tensors& tensors, const Options& options,
                                   const DistributedOptions& distributed, bool backward);
/// The problem of all ranks, from their headers.
DistributedProblem problem_of(const Tensors& tensors, const Options& options,
                              const DistributedOptions& distributed,
                              const std::vector<std::vector<std::int64_t>>& headers);

}  // namespace flashcore::distributed
