// The schemes, forward. Each computes out and lse of this rank's rows.
//
// A backward pass needs the same exchanges and one local step: the gradients of a span of queries
// and a span of keys, given out and LSE of all keys. It would stand beside attend() in local.h.
#pragma once

#include "distributed/engine.h"
#include "distributed/job.h"
#include "distributed/local.h"

namespace flashcore::distributed {

/// This rank's tensors, [batch, heads, rows, dim]; lse is [batch, heads, rows].
struct Shards {
  TensorView q, k, v, out, lse;
  TensorView sinks;  ///< or not given
};

/// The ranks of the engine that take part in a job: `first`, `first + stride`, ...
struct Members {
  std::int32_t rank = 0;  ///< this rank's place among them
  std::int32_t first = 0, stride = 1;

  std::int32_t global(std::int32_t place) const noexcept { return first + place * stride; }
};

Status run_ring(const Job& job, const Members& members, const Engine& engine, Local& local,
                const Shards& shards);
Status run_gather(const Job& job, const Engine& engine, Local& local, const Shards& shards);

/// Attends to one span of queries and one span of keys. With `starts` of kNoStarts the last query
/// is at the last key.
Tensors local_call(const Shards& shards, const TensorView& k, const TensorView& v,
                   const Starts& starts, std::size_t index) noexcept;
/// Adds the positions of a pair of spans, or returns kNoStarts if they are the default.
std::size_t add_starts(Starts& starts, const Mask& mask, Span q, Span k);

/// The memory of the exchange between "some rows of all heads" and "all rows of some heads".
struct HeadExchange {
  Buffer send, recv, tensors;
};
/// Fills `inner` with this rank's heads of all rows of its group, in memory of `exchange`.
Status rows_to_heads(const Job& job, const Engine& engine, Local& local, const Shards& shards,
                     HeadExchange& exchange, Shards& inner);
/// The inverse, for out and lse.
Status heads_to_rows(const Job& job, const Engine& engine, Local& local, const Shards& shards,
                     HeadExchange& exchange, const Shards& inner);

}  // namespace flashcore::distributed
