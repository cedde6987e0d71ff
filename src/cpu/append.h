// Appending to a cache in host memory.
#pragma once

#include "core/append.h"

namespace flashcore::cpu {

/// Copies the new rows. Nothing is written where anything is wrong; the first fault comes back
/// (code 0: none).
core::ErrorSlot append(const core::AppendParams& params) noexcept;

}  // namespace flashcore::cpu
