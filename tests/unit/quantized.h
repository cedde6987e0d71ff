// What quantising is by its definition, in f64, for tests of quantize() and dequantize().
#pragma once

#include <algorithm>
#include <cmath>

#include "support/tensor.h"

namespace flashcore::test {

inline constexpr DType kCodes[] = {DType::e4m3, DType::e5m2, DType::int8, DType::byte};
inline constexpr DType kWide[] = {DType::f32, DType::f16, DType::bf16};

inline double largest_of(DType dtype) {
  return dtype == DType::e5m2 ? 57344 : dtype == DType::int8 ? 127 : 448;
}

/// Half the distance between the codes around a value (given without scale): what rounding may
/// cost.
inline double half_step(DType dtype, double value) {
  if (dtype == DType::int8) return 0.5;
  if (dtype == DType::byte) return 0.5 * 448 / 127;
  const int mantissa = dtype == DType::e4m3 ? 3 : 2, smallest = dtype == DType::e4m3 ? -6 : -14;
  const int exponent = value == 0 ? smallest : std::max(std::ilogb(value), smallest);
  return std::ldexp(0.5, exponent - mantissa);
}

struct Granularity {
  const char* name;
  Shape scale;
  std::int64_t block_rows;
};

/// Where the scale of a row lies.
inline Shape slot_of(const Granularity& g, const Shape& index) {
  if (g.scale.size() == 1) return {0};
  if (g.scale.size() == 2) return {index[0], index[1]};
  return {index[0], index[1], index[2] / g.block_rows};
}

template <typename Visit>
void for_each_index(const Shape& shape, Visit visit) {
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    for (std::int64_t h = 0; h < shape[1]; ++h) {
      for (std::int64_t r = 0; r < shape[2]; ++r) {
        for (std::int64_t c = 0; c < shape[3]; ++c) visit(Shape{b, h, r, c});
      }
    }
  }
}

}  // namespace flashcore::test
