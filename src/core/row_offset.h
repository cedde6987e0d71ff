// Offsets of rows in strided tensors, in elements.
#pragma once

#include "core/paged_kv.h"
#include "core/params.h"

namespace flashcore::core {

/// Row `row` of head h of batch entry b. Indices keep their type: nvcc multiplies a 32-bit index by
/// a 64-bit stride in fewer instructions than two 64-bit numbers.
template <typename Batch, typename Head, typename Row>
FLASHCORE_HD constexpr std::int64_t row_offset(const Strides& strides, Batch b, Head h, Row row) {
  return b * strides.batch + h * strides.head + row * strides.row;
}

/// A key of head h of K or V.
FLASHCORE_HD constexpr std::int64_t row_offset(const Strides& strides, KvLocation location,
                                               std::int32_t h) {
  return row_offset(strides, location.block, h, location.row);
}

}  // namespace flashcore::core
