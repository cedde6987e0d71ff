// Cancellable loops over the columns of a row, which may be most of the tensor.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/cancel.h"

namespace flashcore::cpu {

/// Calls visit(c) for every column. Reads `cancel`, which may be null, every kColumnsPerCheck
/// columns, which take well under a millisecond, and stops if it is set.
template <typename Visit>
void for_each_column(std::int32_t columns, const std::int32_t* cancel, Visit visit) {
  constexpr std::int32_t kColumnsPerCheck = 16384;
  for (std::int32_t first = 0, end = 0; first < columns && !core::is_set(cancel); first = end) {
    end = first + std::min(kColumnsPerCheck, columns - first);
    for (std::int32_t c = first; c < end; ++c) visit(c);
  }
}

}  // namespace flashcore::cpu
