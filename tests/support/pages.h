// Converts a call to paged KV.
#pragma once

#include "support/draw.h"

namespace flashcore::test {

/// Copies [batch, kv_heads, kv_len, dim] K and V, with or without used_k, into pages of `page_size`
/// rows in random order. Unused rows are NaN and unused table entries are -1. used_k holds the
/// lengths, and bias and mask grow to the new capacity.
Inputs paged(Random& random, const Inputs& inputs, std::int64_t page_size);

}  // namespace flashcore::test
