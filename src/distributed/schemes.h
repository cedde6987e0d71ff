// What the schemes share. Each computes out and lse of this rank's rows, or their gradients.
//
// A backward pass has two steps. reserve() takes all memory; then data moves, and no rank fails for
// want of memory while others wait for its messages.
#pragma once

#include <cstddef>

#include "distributed/engine.h"
#include "distributed/job.h"
#include "distributed/local.h"
#include "flashcore/backward.h"

namespace flashcore::distributed {

/// This rank's tensors, [batch, heads, rows, dim]; lse is [batch, heads, rows].
struct Shards {
  TensorView q, k, v, out, lse;
  TensorView sinks;  ///< or not given
};

/// Attends to one span of queries and one span of keys. With `starts` of kNoStarts the last query
/// is at the last key.
Tensors local_call(const Shards& shards, const TensorView& k, const TensorView& v,
                   const Starts& starts, std::size_t index) noexcept;
/// Adds the positions of a pair of spans, or returns kNoStarts if they are the default.
std::size_t add_starts(Starts& starts, const Mask& mask, Span q, Span k);

/// K and V, or dK and dV, of some rows: one after the other, each compact.
struct KeyBlock {
  TensorView k, v;

  KeyBlock(const TensorView& keys, const TensorView& values) noexcept : k(keys), v(values) {}
  KeyBlock(const Job& job, std::byte* data, DType dtype, std::int64_t rows, Device device)
      : k(compact(data, dtype, job.batch, job.kv_heads, rows, job.head_dim, device)),
        v(compact(data + bytes_of(k), dtype, job.batch, job.kv_heads, rows, job.v_dim, device)) {}
};

}  // namespace flashcore::distributed
