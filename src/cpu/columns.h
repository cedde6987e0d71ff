// A row whose length is the caller's: it may be most of the tensor.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/cancel.h"

namespace flashcore::cpu {

/// visit(c) for the columns of a row, in pieces of well under a millisecond. No piece begins while
/// `cancel` (it may be null) is set.
template <typename Visit>
void for_each_column(std::int32_t columns, const std::int32_t* cancel, Visit visit) {
  constexpr std::int32_t kPiece = 16384;
  for (std::int32_t first = 0, end = 0; first < columns && !core::is_set(cancel); first = end) {
    end = first + std::min(kPiece, columns - first);
    for (std::int32_t c = first; c < end; ++c) visit(c);
  }
}

}  // namespace flashcore::cpu
