// Definition of quantization in f64, for tests of quantize() and dequantize().
#pragma once

#include <algorithm>
#include <cmath>

#include "flashcore/flashcore.h"
#include "support/tensor.h"
#include "support/to_c.h"

namespace flashcore::test {

inline constexpr DType kCodes[] = {DType::e4m3, DType::e5m2, DType::int8, DType::u8};
inline constexpr DType kWide[] = {DType::f32, DType::f16, DType::bf16};

inline double largest_of(DType dtype) {
  return dtype == DType::e5m2 ? 57344 : dtype == DType::int8 ? 127 : 448;
}

/// Largest rounding error of an unscaled value: half the distance of the neighbouring 8-bit values.
inline double half_step(DType dtype, double value) {
  if (dtype == DType::int8) return 0.5;
  if (dtype == DType::u8) return 0.5 * 448 / 127;
  const int mantissa = dtype == DType::e4m3 ? 3 : 2, smallest = dtype == DType::e4m3 ? -6 : -14;
  const int exponent = value == 0 ? smallest : std::max(std::ilogb(value), smallest);
  return std::ldexp(0.5, exponent - mantissa);
}

/// C params that quantize `values` to `codes` and, after turn_round(), dequantize those to `again`.
struct CQuantCall {
  CTensor from, to, scale, back;
  flashcore_quant_params params{};

  CQuantCall(const Tensor& values, const Tensor& codes, const Tensor& scales, const Tensor& again)
      : from(values.view()), to(codes.view()), scale(scales.view()), back(again.view()) {
    params.struct_size = sizeof params;
    params.from = &from.tensor;
    params.to = &to.tensor;
    params.scale = &scale.tensor;
  }

  void turn_round() {
    params.from = &to.tensor;
    params.to = &back.tensor;
  }
};

struct Granularity {
  const char* name;
  Shape scale;
  std::int64_t block_rows;
};

/// Index of the scale that an element uses.
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
