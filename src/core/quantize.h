// Quantization of a tensor: its units of work and their scales. The CPU loop (cpu/quantize.cc) and
// the CUDA kernels (cuda/common/quantize.cu) only iterate over them.
#pragma once

#include "core/quant_formats.h"
#include "core/rotation.h"
#include "core/row_offset.h"

namespace flashcore::core {

/// A tensor [batch, heads, rows, columns], divided into units of unit_rows rows of one head. All
/// rows of a unit have the same scale.
struct QuantParams {
  const void* from;
  void* to;
  Strides from_strides, to_strides;
  Element wide, code;                        // f32, f16 or bf16; 8-bit. For both directions
  float* scale;                              // [batch, heads, blocks]
  std::int32_t* saturated;                   // shape of scale, or null
  Strides scale_strides, saturated_strides;  // .row: from block to block; 0 repeats
  std::int32_t batch, heads, rows, columns;
  std::int32_t block_rows;  // rows per scale; not 0
  std::int32_t unit_rows;
  std::int32_t slots_batch, slots_heads, slots_blocks;  // extents of scale as stored
  bool given_scale;
  bool rotate;       // quantize: rotate from first; dequantize: rotate to last (core/rotation.h)
  bool vectors;      // rows of from and to are contiguous, 16-byte aligned and multiples of 16 long
  ErrorSlot* error;  // or null
};

struct QuantUnit {
  std::int32_t b, h, first_row, rows;
};

FLASHCORE_HD std::int32_t units_per_head(const QuantParams& p) {
  return (p.rows + p.unit_rows - 1) / p.unit_rows;
}

FLASHCORE_HD std::int64_t quant_units(const QuantParams& p) {
  return static_cast<std::int64_t>(p.batch) * p.heads * units_per_head(p);
}

FLASHCORE_HD QuantUnit quant_unit(const QuantParams& p, std::int64_t index) {
  const std::int32_t per_head = units_per_head(p);
  const std::int64_t head = index / per_head;
  const auto first = static_cast<std::int32_t>(index % per_head) * p.unit_rows;
  const std::int32_t rest = p.rows - first;
  return {static_cast<std::int32_t>(head / p.heads), static_cast<std::int32_t>(head % p.heads),
          first, rest < p.unit_rows ? rest : p.unit_rows};
}

/// Index of a unit's scale or saturation count, by the strides of that tensor.
FLASHCORE_HD std::int64_t slot_of(const QuantParams& p, const Strides& s, const QuantUnit& unit) {
  return row_offset(s, unit.b, unit.h, unit.first_row / p.block_rows);
}

/// Row-major index of an element in the whole tensor, for messages.
FLASHCORE_HD std::int64_t element_index(const QuantParams& p, const QuantUnit& unit,
                                        std::int32_t row, std::int32_t column) {
  const std::int64_t head = static_cast<std::int64_t>(unit.b) * p.heads + unit.h;
  return (head * p.rows + unit.first_row + row) * p.columns + column;
}

/// max(largest, |x|) over finite x.
FLASHCORE_HD float larger_magnitude(float largest, float x) {
  const float magnitude = float_of_bits(bits_of_float(x) & 0x7fffffffu);
  return magnitude > largest && magnitude < __builtin_inff() ? magnitude : largest;
}

}  // namespace flashcore::core
