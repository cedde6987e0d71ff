// Cases of one attention over several ranks: inputs of the whole sequence, and the rows of each
// rank.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "flashcore/distributed.h"
#include "support/call.h"

namespace flashcore::test {

struct Case {
  const char* name;
  std::vector<std::int64_t> rows;  ///< the length; or contiguous shards, repeated for more ranks
  std::int64_t q_heads = 4, kv_heads = 4;
  Options options{};
  std::int64_t more_keys = 0;  ///< than rows
  bool sinks = false, with_dlse = true;
  DType dtype = DType::f32;
  std::vector<std::int64_t> documents{};  ///< first rows; those past the length do not count
};

/// The rows of each rank, in order, from the documented placement and not from the library.
struct Placement {
  Sharding sharding;
  std::vector<std::vector<std::int64_t>> rows;

  Placement(const Case& c, std::int64_t more, std::int32_t ranks);
  std::vector<std::int64_t> counts() const;
  std::int64_t length() const;
};

/// The documents of a case and the length, or nothing.
std::vector<std::int64_t> documents_of(const Case& c, std::int64_t length);

/// A call over the whole sequence. Packed documents are [rows, heads, dim].
Inputs whole_inputs(const Case& c, std::int64_t q_len, std::int64_t k_len);

/// Packed rows as [1, heads, rows, dim]; an LSE as [1, heads, rows].
TensorView dense(const TensorView& view);
TensorView dense_lse(const TensorView& lse);
Tensors dense(const Tensors& tensors);

/// Writes a rank's rows to their places.
void put(Tensor& whole, int axis, const std::vector<std::int64_t>& rows, const Tensor& part);

/// Empty if the messages of a rank, in order, are the steps that the model names; a step may have
/// several messages.
std::string step_difference(const std::vector<SentBytes>& steps,
                            const std::vector<std::int64_t>& messages);

}  // namespace flashcore::test
