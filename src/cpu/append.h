// Appends to a KV cache in host memory.
#pragma once

#include "core/append.h"

namespace flashcore::cpu {

/// Copies or quantises the new rows. Returns the first error, or code 0; after an error the cache
/// is unchanged. Stops soon after `cancel` is set; `cancel` may be null.
core::ErrorSlot append(const core::AppendParams& params, const std::int32_t* cancel) noexcept;

}  // namespace flashcore::cpu
