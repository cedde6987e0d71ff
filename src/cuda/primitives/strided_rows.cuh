// Rows of a strided matrix in global memory, in any format, four columns at a time.
#pragma once

#include "core/params.h"
#include "core/row_offset.h"
#include "cuda/primitives/convert.cuh"

namespace flashcore::cuda {

/// The rows of one sequence and head.
struct StridedRows {
  const void* g_data;
  std::int64_t row, column;  // strides
  std::int64_t first;        // element of row 0
  std::int32_t columns;
  core::Element element;
  bool vec4;  // four columns are one aligned vector
};

__device__ __forceinline__ StridedRows strided_rows(const void* g_data, core::Element element,
                                                    const core::Strides& strides, std::int32_t b,
                                                    std::int32_t h, std::int32_t first_row,
                                                    std::int32_t columns) {
  StridedRows m{g_data,  strides.row, strides.column, core::row_offset(strides, b, h, first_row),
                columns, element,     false};
  const auto address = reinterpret_cast<std::uintptr_t>(g_data);
  const bool aligned = address % (element == core::Element::f32 ? 16 : 8) == 0;
  m.vec4 = aligned && m.column == 1 && columns % 4 == 0 && m.row % 4 == 0 && m.first % 4 == 0;
  return m;
}

/// An element in f32, f16 or bf16.
__device__ __forceinline__ float load_as_float(const void* g_data, core::Element element,
                                               std::int64_t at) {
  if (element == core::Element::f32) return static_cast<const float*>(g_data)[at];
  if (element == core::Element::f16) return to_float(static_cast<const __half*>(g_data)[at]);
  return to_float(static_cast<const __nv_bfloat16*>(g_data)[at]);
}

/// Columns column to column + 3 of row r, 0 past the last column.
__device__ __forceinline__ float4 load_four_columns(const StridedRows& m, std::int32_t r,
                                                    std::int32_t column) {
  const std::int64_t at = m.first + r * m.row + column * m.column;
  if (column >= m.columns) return make_float4(0.f, 0.f, 0.f, 0.f);
  if (m.vec4) {
    if (m.element == core::Element::f32) return load_four(static_cast<const float*>(m.g_data) + at);
    if (m.element == core::Element::f16) {
      return load_four(static_cast<const __half*>(m.g_data) + at);
    }
    return load_four(static_cast<const __nv_bfloat16*>(m.g_data) + at);
  }
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = column + i < m.columns ? load_as_float(m.g_data, m.element, at + i * m.column) : 0.f;
  }
  return make_float4(x[0], x[1], x[2], x[3]);
}

__device__ __forceinline__ bool is_finite(float x) { return x - x == 0.f; }
__device__ __forceinline__ bool is_finite(float4 x) {
  return is_finite(x.x) && is_finite(x.y) && is_finite(x.z) && is_finite(x.w);
}
__device__ __forceinline__ float finite_or_zero(float x) { return is_finite(x) ? x : 0.f; }
__device__ __forceinline__ float4 finite_or_zero(float4 x) {
  return make_float4(finite_or_zero(x.x), finite_or_zero(x.y), finite_or_zero(x.z),
                     finite_or_zero(x.w));
}

}  // namespace flashcore::cuda
