// The two 16-bit tensor-core formats as a runtime value.
#pragma once

#include <cstdint>

#include "core/numeric.h"

namespace flashcore::gpu_test {

enum class HalfFormat { f16, bf16 };

inline std::uint16_t bits_of(HalfFormat format, float x) {
  return format == HalfFormat::f16 ? core::f16_of_float(x) : core::bf16_of_float(x);
}

inline float value_of(HalfFormat format, std::uint16_t bits) {
  return format == HalfFormat::f16 ? core::float_of_f16(bits) : core::float_of_bf16(bits);
}

}  // namespace flashcore::gpu_test
