// The cancellation flag of a call.
#pragma once

#include <cstdint>

#include "core/config.h"

namespace flashcore::core {

/// `cancel` may be null. Relaxed, because the flag guards no data.
FLASHCORE_HD bool is_set(const std::int32_t* cancel) {
  return cancel != nullptr && __atomic_load_n(cancel, __ATOMIC_RELAXED) != 0;
}

}  // namespace flashcore::core
