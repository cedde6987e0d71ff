// Appending to a cache in host memory.
#pragma once

#include "core/append.h"

namespace flashcore::cpu {

/// Copies the new rows. Nothing is written where anything is wrong; the first fault comes back
/// (code 0: none). Leaves off soon after `cancel` (it may be null) is set.
core::ErrorSlot append(const core::AppendParams& params, const std::int32_t* cancel) noexcept;

}  // namespace flashcore::cpu
