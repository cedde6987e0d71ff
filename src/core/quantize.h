// Quantising: which elements share a scale, and what is done with one. The CPU loop
// (cpu/quantize.cc) and the CUDA kernels (cuda/common/quantize.cu) only walk over them.
#pragma once

#include "core/quant_formats.h"
#include "core/rotation.h"
#include "core/row_offset.h"

namespace flashcore::core {

/// The rows of work. [batch, heads, rows, columns] is cut into units of unit_rows rows of one head,
/// which never straddle two scales.
struct QuantParams {
  const void* from;
  void* to;
  Strides from_strides, to_strides;
  Element wide, code;                        // the formats, whichever way it goes
  float* scale;                              // [batch, heads, blocks]
  std::int32_t* saturated;                   // like scale, or null
  Strides scale_strides, saturated_strides;  // .row steps from block to block; 0: one for all
  std::int32_t batch, heads, rows, columns;
  std::int32_t block_rows;  // rows that share a scale; not 0
  std::int32_t unit_rows;
  std::int32_t slots_batch, slots_heads, slots_blocks;  // extents of scale, as it is stored
  bool given_scale;
  bool rotate;       // rows of from are rotated first, those of to last (core/rotation.h)
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

/// Where the scale (and the count) of a unit lies.
FLASHCORE_HD std::int64_t slot_of(const QuantParams& p, const Strides& s, const QuantUnit& unit) {
  return row_offset(s, unit.b, unit.h, unit.first_row / p.block_rows);
}

/// An element's place, counted row by row over the whole tensor: what messages name.
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
