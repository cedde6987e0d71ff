// The same call with its keys in pages.
#pragma once

#include "support/draw.h"

namespace flashcore::test {

/// [batch, kv_heads, kv_len, dim] keys (fixed lengths, used_k or not) as pages of `page_size` in
/// random order. Rows that hold no key are NaN and entries of the table that no key needs are no
/// page; used_k says the lengths, and bias and mask grow to the new capacity.
Inputs paged(Random& random, const Inputs& inputs, std::int64_t page_size);

}  // namespace flashcore::test
