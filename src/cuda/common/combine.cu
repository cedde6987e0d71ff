// Combines partial results: out = Σ weight_i O_i, LSE = log Σ exp(LSE_i) (core/combine.h).
//
//   grid   a warp per row of (batch, head, query); warps loop if the grid is smaller
//
// Calls with many rows have a kernel of their own (combine_many.cuh).
#include <cuda_runtime.h>

#include <cstdint>

#include "core/assert.h"
#include "core/combine.h"
#include "core/row_offset.h"
#include "cuda/common/combine_many.cuh"
#include "cuda/primitives/convert.cuh"
#include "cuda/registry.h"

namespace flashcore::cuda {
namespace {

__device__ __forceinline__ bool is_aligned(const void* g_data, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(g_data) % static_cast<std::uintptr_t>(bytes) == 0;
}

/// sum += weight times up to four columns of a partial row.
__device__ __forceinline__ void add_weighted(float (&sum)[4], float weight, const float* g_row,
                                             std::int64_t stride, int column, int columns) {
  if (stride == 1 && column + 4 <= columns && is_aligned(g_row + column, 16)) {
    const float4 x = *reinterpret_cast<const float4*>(g_row + column);
    sum[0] = fmaf(weight, x.x, sum[0]);
    sum[1] = fmaf(weight, x.y, sum[1]);
    sum[2] = fmaf(weight, x.z, sum[2]);
    sum[3] = fmaf(weight, x.w, sum[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column + i < columns) sum[i] = fmaf(weight, g_row[(column + i) * stride], sum[i]);
  }
}

/// A row by the lanes of a warp, four columns each, and the same of further columns.
template <typename Params>
__device__ __forceinline__ void combine_row(const Params& p, std::int64_t b, std::int64_t h,
                                            std::int64_t row, int lane) {
  const core::SoftmaxState<float> state = core::combine_state<float>(p, b, h, row);
  core::assert_combined(p, state, b, h, row);
  const std::int64_t base = core::row_offset(p.out_strides, b, h, row);
  const std::int64_t size = p.out_element == core::Element::f32 ? 4 : 2;
  const char* const g_out_row = static_cast<const char*>(p.out) + base * size;
  for (int c = 4 * lane; c < p.v_dim; c += 4 * 32) {
    float sum[4] = {};
    for (int part = 0; part < p.parts; ++part) {
      if (core::partial_is_empty<float>(p, part, b, h, row)) continue;
      const float weight = core::combine_weight(p, state, part, b, h, row);
      std::int64_t stride;
      const float* g_row = core::partial_out_row<float>(p, part, b, h, row, stride);
      add_weighted(sum, weight, g_row, stride, c, p.v_dim);
    }
    const bool whole = p.out_strides.column == 1 && c + 4 <= p.v_dim;
    store_columns(p.out, p.out_element, base, p.out_strides.column, c, p.v_dim, sum,
                  whole && is_aligned(g_out_row + c * size, 4 * size));
  }
  if (lane == 0 && p.lse != nullptr) {
    static_cast<float*>(p.lse)[core::row_offset(p.lse_strides, b, h, row)] =
        core::log_sum_exp(state);
  }
}

template <typename Params>
__device__ __forceinline__ void combine_rows(const Params& p) {
  constexpr int kRows = kCombineThreads / 32;  // of a CTA
  const int lane = threadIdx.x % 32;
  const std::int64_t rows = static_cast<std::int64_t>(p.batch) * p.q_heads * p.rows;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kRows;
  for (std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x / 32; r < rows;
       r += step) {
    const std::int64_t head = r / p.rows, row = r - head * p.rows;
    const std::int64_t b = head / p.q_heads, h = head - b * p.q_heads;
    if (!core::combine_skips_row(p, row)) combine_row(p, b, h, row, lane);
  }
}

__global__ void __launch_bounds__(kCombineThreads)
    combine(const __grid_constant__ core::CombineParams p) {
  combine_rows(p);
}

__global__ void __launch_bounds__(kCombineThreads)
    combine_long(const __grid_constant__ core::LongCombineParams p) {
  combine_rows(p);
}

/// One thread per entry. Kernel arguments bring the entries to the GPU: unlike a copy from the
/// host, a graph keeps their values.
__global__ void fill_table(const __grid_constant__ CombineTableChunk chunk) {
  const int entry = static_cast<int>(threadIdx.x);
  if (entry < chunk.count) chunk.to[entry] = chunk.entries[entry];
}

}  // namespace

CombineForm combine_form(const core::CombineParams& p) noexcept {
  const std::int64_t heads = static_cast<std::int64_t>(p.batch) * p.q_heads, rows = heads * p.rows;
  constexpr std::int64_t kRows = kCombineThreads / 32;
  const std::int64_t ctas = (rows + kRows - 1) / kRows;
  if (p.long_table != nullptr) return {reinterpret_cast<const void*>(&combine_long), ctas};
  // Few rows leave SMs without work, and their time is that of one row.
  constexpr std::int64_t kLeastRows = 1 << 15, kLeastRowsOfHead = kManyRows / 2;
  const std::int64_t many_ctas = heads * ((p.rows + kManyRows - 1) / kManyRows);
  const bool many = rows >= kLeastRows && p.rows >= kLeastRowsOfHead &&
                    p.parts <= core::kMaxCombineTable && many_ctas <= INT32_MAX;
  if (!many) return {reinterpret_cast<const void*>(&combine), ctas};
  return {reinterpret_cast<const void*>(&combine_many), many_ctas};
}
const void* fill_table_entry() noexcept { return reinterpret_cast<const void*>(&fill_table); }

}  // namespace flashcore::cuda
