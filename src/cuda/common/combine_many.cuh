// Combines partial results of many rows at the speed of memory.
//
//   grid   a CTA per 64 rows of a head, the last rows of the tensor first: kernels write them last,
//          so that they may still be in L2
//   1      a thread per row: the weights of its partials, to shared memory; the LSE
//   2      some lanes per row, four columns each: sums. Loads do not depend on other loads, and a
//          lane has kManyBatch of them in flight
#pragma once

#include <cuda_runtime.h>

#include "core/assert.h"
#include "core/combine.h"
#include "core/row_offset.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/registry.h"

namespace flashcore::cuda {

inline constexpr int kManyRows = 64, kManyBatch = 4;
static_assert(kManyRows <= kCombineThreads);

/// Rows of a head, by CTA.
struct CombineRows {
  std::int64_t b, h, first;
  int count;
};

__device__ __forceinline__ CombineRows rows_of_cta(const core::CombineParams& p) {
  const std::uint32_t chunks = (static_cast<std::uint32_t>(p.rows) + kManyRows - 1) / kManyRows;
  const std::uint32_t index = gridDim.x - 1 - blockIdx.x, head = index / chunks;
  const std::uint32_t heads = static_cast<std::uint32_t>(p.q_heads), b = head / heads;
  const auto first = static_cast<std::int64_t>(index - head * chunks) * kManyRows;
  return {b, head - b * heads, first,
          static_cast<int>(min(p.rows - first, std::int64_t{kManyRows}))};
}

/// True if four columns of every row can be read or written at once.
__device__ __forceinline__ bool has_vectors(const void* g_first, const core::Strides& strides,
                                            std::int64_t element_bytes, int column, int columns) {
  const std::int64_t bytes = 4 * element_bytes;
  return strides.column == 1 && column + 4 <= columns && strides.row % 4 == 0 &&
         reinterpret_cast<std::uintptr_t>(g_first) % static_cast<std::uintptr_t>(bytes) == 0;
}

/// sum[i] += weight * row r + i * step, four columns, for the rows below `rows`. s_weights: of this
/// partial, negative if the row is not read.
__device__ __forceinline__ void add_rows(float (&sum)[kManyBatch][4], const float* s_weights,
                                         const float* g_first, const core::Strides& strides, int r,
                                         int step, int rows, int column, int columns) {
  if (has_vectors(g_first, strides, 4, column, columns)) {
    float4 x[kManyBatch];
    float weight[kManyBatch];
#pragma unroll
    for (int i = 0; i < kManyBatch; ++i) {
      const int row = r + i * step;
      weight[i] = row < rows ? s_weights[row] : -1.f;
      if (!(weight[i] < 0.f)) {
        x[i] = __ldcs(reinterpret_cast<const float4*>(g_first + row * strides.row + column));
      }
    }
#pragma unroll
    for (int i = 0; i < kManyBatch; ++i) {
      if (weight[i] < 0.f) continue;
      sum[i][0] = fmaf(weight[i], x[i].x, sum[i][0]);
      sum[i][1] = fmaf(weight[i], x[i].y, sum[i][1]);
      sum[i][2] = fmaf(weight[i], x[i].z, sum[i][2]);
      sum[i][3] = fmaf(weight[i], x[i].w, sum[i][3]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kManyBatch; ++i) {
    const int row = r + i * step;
    const float weight = row < rows ? s_weights[row] : -1.f;
    if (weight < 0.f) continue;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (column + c >= columns) continue;
      const float x = g_first[row * strides.row + (column + c) * strides.column];
      sum[i][c] = fmaf(weight, x, sum[i][c]);
    }
  }
}

/// Step 1: the weights of a row, and its LSE.
__device__ __forceinline__ void weigh_row(const core::CombineParams& p, const CombineRows& rows,
                                          int r, float (*s_weights)[kManyRows]) {
  const std::int64_t row = rows.first + r;
  const core::SoftmaxState<float> state = core::combine_state<float>(p, rows.b, rows.h, row);
  core::assert_combined(p, state, rows.b, rows.h, row);
  for (int part = 0; part < p.parts; ++part) {
    s_weights[part][r] = core::partial_is_empty<float>(p, part, rows.b, rows.h, row)
                             ? -1.f
                             : core::combine_weight(p, state, part, rows.b, rows.h, row);
  }
  if (p.lse != nullptr && !core::combine_skips_row(p, row)) {
    static_cast<float*>(p.lse)[core::row_offset(p.lse_strides, rows.b, rows.h, row)] =
        core::log_sum_exp(state);
  }
}

/// For up to kMaxCombineTable partials.
__global__ void __launch_bounds__(kCombineThreads)
    combine_many(const __grid_constant__ core::CombineParams p) {
  __shared__ float s_weights[core::kMaxCombineTable][kManyRows];
  const CombineRows rows = rows_of_cta(p);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < rows.count) weigh_row(p, rows, thread, s_weights);
  __syncthreads();

  const int lanes_log2 = p.v_dim > 64 ? 5 : p.v_dim > 32 ? 4 : 3;
  const int step = kCombineThreads >> lanes_log2;  // rows at a time
  const int lane = thread & ((1 << lanes_log2) - 1);
  const std::int64_t size = p.out_element == core::Element::f32 ? 4 : 2;
  const std::int64_t out = core::row_offset(p.out_strides, rows.b, rows.h, rows.first);
  const char* const g_out = static_cast<const char*>(p.out) + out * size;
  for (int column = 4 * lane; column < p.v_dim; column += 4 << lanes_log2) {
    const bool whole = has_vectors(g_out, p.out_strides, size, column, p.v_dim);
    for (int r = thread >> lanes_log2; r < rows.count; r += kManyBatch * step) {
      float sum[kManyBatch][4] = {};
      for (int part = 0; part < p.parts; ++part) {
        std::int64_t stride;
        const float* g_first =
            core::partial_out_row<float>(p, part, rows.b, rows.h, rows.first, stride);
        add_rows(sum, s_weights[part], g_first, core::partial_at(p, part).out_strides, r, step,
                 rows.count, column, p.v_dim);
      }
#pragma unroll
      for (int i = 0; i < kManyBatch; ++i) {
        const int row = r + i * step;
        if (row >= rows.count || core::combine_skips_row(p, rows.first + row)) continue;
        store_columns(p.out, p.out_element, out + row * p.out_strides.row, p.out_strides.column,
                      column, p.v_dim, sum[i], whole);
      }
    }
  }
}

}  // namespace flashcore::cuda
