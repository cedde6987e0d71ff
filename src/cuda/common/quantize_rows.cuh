// Loops over the rows of a unit for common/quantize.cu: by vectors of 16 elements, by elements, or
// by rows (rotated rows that are not whole vectors). Also CTA-wide reductions and error reports.
#pragma once

#include "cuda/common/quantize_vec16.cuh"
#include "cuda/primitives/report.cuh"
#include "cuda/registry.h"

namespace flashcore::cuda {

using core::QuantUnit;

inline constexpr int kQuantWarps = kQuantThreads / 32;

template <typename Body>
__device__ __forceinline__ void for_each_unit(const QuantParams& p, Body body) {
  const std::int64_t units = core::quant_units(p);
  for (std::int64_t i = blockIdx.x; i < units; i += gridDim.x) body(core::quant_unit(p, i));
}

/// The location of an element, or of the first element of a vector.
struct At {
  std::int64_t from, to;     // offsets
  std::int32_t row, column;  // in the unit
};

/// Calls visit(at, load(offset in from), valid) for the unit's vectors. Every thread of the CTA
/// makes the same number of calls, so that warps can exchange values. A thread without a vector
/// left gets one of the last row, with valid = false. The next vector is loaded before the current
/// one is visited. Adjacent lanes of one warp hold the vectors of a rotation block: rows are whole
/// blocks, and a block is a power of two of at most 32 vectors.
template <typename Load, typename Visit>
__device__ __forceinline__ void for_each_vec(const QuantParams& p, const QuantUnit& unit, Load load,
                                             Visit visit) {
  const auto per_row = static_cast<std::uint32_t>(p.columns / kVec);
  const std::int64_t from = core::row_offset(p.from_strides, unit.b, unit.h, unit.first_row);
  const std::int64_t to = core::row_offset(p.to_strides, unit.b, unit.h, unit.first_row);
  const std::int64_t vecs = static_cast<std::int64_t>(unit.rows) * per_row;
  const auto place = [&](std::uint32_t row, std::uint32_t vec) {
    const std::uint32_t there = min(row, static_cast<std::uint32_t>(unit.rows - 1));
    const std::int32_t column = static_cast<std::int32_t>(vec) * kVec;
    return At{from + there * p.from_strides.row + column, to + there * p.to_strides.row + column,
              static_cast<std::int32_t>(there), column};
  };
  // Row and column advance by additions: a division per vector takes longer than its memory access.
  const std::uint32_t more_rows = kQuantThreads / per_row, more_vecs = kQuantThreads % per_row;
  std::uint32_t row = threadIdx.x / per_row, vec = threadIdx.x % per_row;
  At at = place(row, vec);
  auto loaded = load(at.from);
  for (std::int64_t next = kQuantThreads; next - kQuantThreads < vecs; next += kQuantThreads) {
    const At now = at;
    const auto loaded_now = loaded;
    const bool there = row < static_cast<std::uint32_t>(unit.rows);
    row += more_rows;
    vec += more_vecs;
    if (vec >= per_row) vec -= per_row, ++row;
    at = place(row, vec);
    if (next < vecs) loaded = load(at.from);
    visit(now, loaded_now, there);
  }
}

/// Calls visit(at) for each element of the unit, distributed over the CTA's threads.
template <typename Visit>
__device__ __forceinline__ void for_each_element(const QuantParams& p, const QuantUnit& unit,
                                                 Visit visit) {
  const std::int64_t from = core::row_offset(p.from_strides, unit.b, unit.h, unit.first_row);
  const std::int64_t to = core::row_offset(p.to_strides, unit.b, unit.h, unit.first_row);
  const std::int64_t elements = static_cast<std::int64_t>(unit.rows) * p.columns;
  for (std::int64_t i = threadIdx.x; i < elements; i += kQuantThreads) {
    const auto row = static_cast<std::int32_t>(i / p.columns);
    const auto column = static_cast<std::int32_t>(i % p.columns);
    visit(At{from + row * p.from_strides.row + column * p.from_strides.column,
             to + row * p.to_strides.row + column * p.to_strides.column, row, column});
  }
}

/// The warp's row in shared memory. Not in a template, because each instance would have its own.
__device__ __forceinline__ float* shared_row() {
  __shared__ float s_rows[kQuantWarps][core::kMaxRotatedColumns];
  return s_rows[threadIdx.x / 32];
}

/// Rotation of rows that are not whole vectors, one row per warp, in shared memory. load(at)
/// returns an input of the butterflies; visit(at, sum) gets their sums.
template <typename Load, typename Visit>
__device__ __forceinline__ void for_each_sum(const QuantParams& p, const QuantUnit& unit, Load load,
                                             Visit visit) {
  float* s_row = shared_row();
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const std::int32_t order = core::rotation_order(p.columns);
  const std::int64_t from = core::row_offset(p.from_strides, unit.b, unit.h, unit.first_row);
  const std::int64_t to = core::row_offset(p.to_strides, unit.b, unit.h, unit.first_row);
  for (std::int64_t r = threadIdx.x / 32; r < unit.rows; r += kQuantWarps) {
    const auto at = [&](std::int32_t c) {
      return At{from + r * p.from_strides.row + c * p.from_strides.column,
                to + r * p.to_strides.row + c * p.to_strides.column, static_cast<std::int32_t>(r),
                c};
    };
    for (std::int32_t c = lane; c < p.columns; c += 32) s_row[c] = load(at(c));
    for (std::int32_t distance = 1; distance < order; distance *= 2) {
      __syncwarp();
      for (std::int32_t pair = lane; pair < p.columns / 2; pair += 32) {
        const std::int32_t i = 2 * pair - (pair & (distance - 1));
        const float low = s_row[i], high = s_row[i + distance];
        s_row[i] = low + high;
        s_row[i + distance] = low - high;
      }
    }
    __syncwarp();
    for (std::int32_t c = lane; c < p.columns; c += 32) visit(at(c), s_row[c]);
    __syncwarp();  // all lanes have read the row
  }
}

__device__ __forceinline__ bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7fffffffu) < 0x7f800000u;
}

/// Reports a NaN that the format cannot represent. In a rotated row the report names the first
/// non-finite element of the same rotation block, or this element if all are finite and their sum
/// overflowed.
template <bool kRotate>
__device__ __forceinline__ void report_nan(const QuantParams& p, const QuantUnit& unit,
                                           std::int32_t row, std::int32_t column) {
  if (p.error == nullptr) return;
  if constexpr (kRotate) {
    const std::int64_t from =
        core::row_offset(p.from_strides, unit.b, unit.h, unit.first_row + row);
    const std::int32_t order = core::rotation_order(p.columns);
    const std::int32_t first = column / order * order;
    for (std::int32_t c = first + order - 1; c >= first; --c) {
      const auto x = core::load_element<float>(p.from, p.wide, from + c * p.from_strides.column);
      if (!is_finite(x)) column = c;
    }
  }
  report(p.error, {static_cast<std::int32_t>(core::ErrorCode::quantized_nan), unit.b,
                   core::element_index(p, unit, row, column), kRotate ? 1 : 0});
}

/// Reduces x over the CTA. Thread 0 gets the result.
template <typename T, typename Join>
__device__ __forceinline__ T reduce_cta(T x, Join join) {
  __shared__ T s_warps[kQuantWarps];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = join(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  __syncthreads();  // thread 0 has read s_warps of the previous unit
  if (threadIdx.x % 32 == 0) s_warps[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 1; warp < kQuantWarps; ++warp) x = join(x, s_warps[warp]);
  }
  return x;
}

}  // namespace flashcore::cuda
