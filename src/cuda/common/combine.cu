// Combines partial results: out = Σ weight_i O_i, LSE = log Σ exp(LSE_i) (core/combine.h).
//
//   grid   some lanes per row of (batch, head, query): 32 if there are few rows, otherwise 8; they
//          loop if the grid is smaller
//   lanes  four columns of V each, and the same of further columns
#include <cuda_runtime.h>

#include "core/assert.h"
#include "core/combine.h"
#include "core/row_offset.h"
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

/// A row by kLanes lanes: kGroups times four columns a lane, then the next columns. More groups
/// need fewer instructions a row, more lanes less time for one row.
template <int kLanes, typename Params>
__device__ __forceinline__ void combine_row(const Params& p, std::int64_t b, std::int64_t h,
                                            std::int64_t row, int lane) {
  constexpr int kGroups = 32 / kLanes, kColumns = 4 * kLanes;
  const core::SoftmaxState<float> state = core::combine_state<float>(p, b, h, row);
  core::assert_combined(p, state, b, h, row);
  const std::int64_t base = core::row_offset(p.out_strides, b, h, row);
  const std::int64_t size = p.out_element == core::Element::f32 ? 4 : 2;
  const char* const g_out_row = static_cast<const char*>(p.out) + base * size;
  for (int first = 4 * lane; first < p.v_dim; first += kGroups * kColumns) {
    float sum[kGroups][4] = {};
    for (int part = 0; part < p.parts; ++part) {
      if (core::partial_is_empty<float>(p, part, b, h, row)) continue;
      const float weight = core::combine_weight(p, state, part, b, h, row);
      std::int64_t stride;
      const float* g_row = core::partial_out_row<float>(p, part, b, h, row, stride);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        add_weighted(sum[i], weight, g_row, stride, first + i * kColumns, p.v_dim);
      }
    }
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int c = first + i * kColumns;
      const bool whole = p.out_strides.column == 1 && c + 4 <= p.v_dim;
      store_columns(p.out, p.out_element, base, p.out_strides.column, c, p.v_dim, sum[i],
                    whole && is_aligned(g_out_row + c * size, 4 * size));
    }
  }
  if (lane == 0 && p.lse != nullptr) {
    static_cast<float*>(p.lse)[core::row_offset(p.lse_strides, b, h, row)] =
        core::log_sum_exp(state);
  }
}

template <int kLanes, typename Params>
__device__ __forceinline__ void combine_rows(const Params& p) {
  constexpr int kRows = kCombineThreads / kLanes;  // of a CTA
  const int lane = threadIdx.x % kLanes;
  const std::int64_t rows = static_cast<std::int64_t>(p.batch) * p.q_heads * p.rows;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kRows;
  for (std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x / kLanes;
       r < rows; r += step) {
    const std::int64_t head = r / p.rows, row = r - head * p.rows;
    const std::int64_t b = head / p.q_heads, h = head - b * p.q_heads;
    if (!core::combine_skips_row(p, row)) combine_row<kLanes>(p, b, h, row, lane);
  }
}

template <int kLanes>
__global__ void __launch_bounds__(kCombineThreads)
    combine(const __grid_constant__ core::CombineParams p) {
  combine_rows<kLanes>(p);
}

template <int kLanes>
__global__ void __launch_bounds__(kCombineThreads)
    combine_long(const __grid_constant__ core::LongCombineParams p) {
  combine_rows<kLanes>(p);
}

/// One thread per entry. Kernel arguments bring the entries to the GPU: unlike a copy from the
/// host, a graph keeps their values.
__global__ void fill_table(const __grid_constant__ CombineTableChunk chunk) {
  const int entry = static_cast<int>(threadIdx.x);
  if (entry < chunk.count) chunk.to[entry] = chunk.entries[entry];
}

template <int kLanes>
CombineForm form_with() noexcept {
  return {reinterpret_cast<const void*>(&combine<kLanes>),
          reinterpret_cast<const void*>(&combine_long<kLanes>), kCombineThreads / kLanes};
}

}  // namespace

CombineForm combine_form(std::int64_t rows) noexcept {
  // Few rows leave SMs without work, and their time is that of one row.
  constexpr std::int64_t kManyRows = 1 << 15;
  return rows < kManyRows ? form_with<32>() : form_with<8>();
}
const void* fill_table_entry() noexcept { return reinterpret_cast<const void*>(&fill_table); }

}  // namespace flashcore::cuda
