// Sums of f32 in host memory, of any alignment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/numeric.h"
#include "flashcore/types.h"

namespace flashcore::distributed {

inline void add_floats(std::byte* sums, const std::byte* terms, std::int64_t count) noexcept {
  for (std::int64_t i = 0; i < count; ++i) {
    float sum, term;
    std::memcpy(&sum, sums + 4 * i, 4);
    std::memcpy(&term, terms + 4 * i, 4);
    sum += term;
    std::memcpy(sums + 4 * i, &sum, 4);
  }
}

/// Rounds f32 to f16 or bf16 in place: the results take the first half of the memory.
inline void round_floats(std::byte* data, std::int64_t count, DType dtype) noexcept {
  for (std::int64_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, data + 4 * i, 4);
    const std::uint16_t rounded =
        dtype == DType::f16 ? core::f16_of_float(value) : core::bf16_of_float(value);
    std::memcpy(data + 2 * i, &rounded, 2);
  }
}

}  // namespace flashcore::distributed
