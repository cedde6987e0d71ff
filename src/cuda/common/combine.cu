// Combines partial results: out = Σ weight_i O_i, LSE = log Σ exp(LSE_i) (core/combine.h).
//
//   grid   one warp per row of (batch, head, query); warps loop if the grid is smaller
//   lanes  columns of V with a stride of 32
#include <cuda_runtime.h>

#include "core/assert.h"
#include "core/combine.h"
#include "core/element.h"
#include "core/row_offset.h"
#include "cuda/registry.h"

namespace flashcore::cuda {
namespace {

template <typename Params>
__device__ __forceinline__ void combine_rows(const Params& p) {
  const int lane = threadIdx.x % 32;
  const std::int64_t rows = static_cast<std::int64_t>(p.batch) * p.q_heads * p.rows;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kCombineRowsPerCta;
  for (std::int64_t r =
           static_cast<std::int64_t>(blockIdx.x) * kCombineRowsPerCta + threadIdx.x / 32;
       r < rows; r += step) {
    const std::int64_t row = r % p.rows;
    const std::int64_t h = r / p.rows % p.q_heads;
    const std::int64_t b = r / p.rows / p.q_heads;
    if (core::combine_skips_row(p, row)) continue;
    const core::SoftmaxState<float> state = core::combine_state<float>(p, b, h, row);
    core::assert_combined(p, state, b, h, row);
    const std::int64_t base = core::row_offset(p.out_strides, b, h, row);
    for (int c = lane; c < p.v_dim; c += 32) {
      float sum = 0.f;
      for (int part = 0; part < p.parts; ++part) {
        if (core::partial_is_empty<float>(p, part, b, h, row)) continue;
        const float weight = core::combine_weight(p, state, part, b, h, row);
        std::int64_t stride;
        const float* g_out = core::partial_out_row<float>(p, part, b, h, row, stride);
        sum = fmaf(weight, g_out[c * stride], sum);
      }
      core::store_element(p.out, p.out_element, base + c * p.out_strides.column, sum);
    }
    if (lane == 0 && p.lse != nullptr) {
      static_cast<float*>(p.lse)[core::row_offset(p.lse_strides, b, h, row)] =
          core::log_sum_exp(state);
    }
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

const void* combine_entry() noexcept { return reinterpret_cast<const void*>(&combine); }
const void* combine_long_entry() noexcept { return reinterpret_cast<const void*>(&combine_long); }
const void* fill_table_entry() noexcept { return reinterpret_cast<const void*>(&fill_table); }

}  // namespace flashcore::cuda
