// Reads tensors as doubles. 8-bit formats are decoded without their scale.
#pragma once

#include <cstdint>
#include <vector>

#include "flashcore/problem.h"
#include "reference/oracle.h"

namespace flashcore::reference {

/// `count` elements, the first at index `first`, `stride` apart.
void read_elements(const void* data, DType dtype, std::int64_t first, std::int64_t stride,
                   std::int64_t count, double* values);

/// A [batch, heads, rows, columns] operand, dense or varlen, with its layout in Problem.
struct Operand {
  const void* data;
  const Layout& layout;

  /// `count` columns of a row.
  void read(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t count,
            double* values) const {
    read_elements(data, layout.dtype, b * layout.batch + h * layout.head + row * layout.row,
                  layout.column, count, values);
  }
};

/// Reads key j of a sequence, from dense, varlen or paged K or V.
void read_key(const Problem& problem, const Tensors& tensors, const Operand& operand,
              std::int64_t b, std::int64_t kv_head, const Lengths& lengths, std::int64_t j,
              std::int64_t count, double* values);

/// The scale of row (or key) `row` of a sequence; 1 without scales.
double scale_at(const TensorView& scale, std::int64_t b, std::int64_t h, std::int64_t row,
                std::int64_t block_rows);

}  // namespace flashcore::reference
