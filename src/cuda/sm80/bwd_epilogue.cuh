// Stores gradients: dQ, dK and dV from accumulators, dbias from sums of pairs.
#pragma once

#include "core/row_offset.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/memory.cuh"
#include "cuda/sm80/bwd_config.cuh"

namespace flashcore::cuda::sm80 {

/// Stores acc * scale, in q's type or f32, to rows [0, rows) of a gradient, whose row 0 is element
/// `first`. The rows pass through shared memory, over A1 and A2, where a rolled loop reads four
/// columns at a time: unrolled code for every format and alignment would be half of the kernel.
template <typename C>
__device__ __forceinline__ void store_gradient(const AccGradient<C>& acc, BwdTiles<C>& s,
                                               void* g_data, core::Element element,
                                               std::int64_t first, const core::Strides& strides,
                                               int rows, int columns, float scale) {
  static_assert(sizeof(s.a1) + sizeof(s.a2) == sizeof(float) * C::kTile * C::kHeadDim);
  auto* s_rows = reinterpret_cast<float*>(s.a1);  // [tile, head_dim], swizzled
  // Four rows of a warp's columns go to different banks.
  const auto offset = [](int row, int column) {
    return row * C::kHeadDim + (column ^ (row % 4 * 8));
  };
  const BwdThread<C> t(threadIdx.x);
  __syncthreads();  // all warps have read A1 and A2, or the gradient stored before
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int group = 0; group < C::kGroups; ++group) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const float(&x)[4] = acc[m][group][tile];
          *reinterpret_cast<float2*>(s_rows + offset(t.row(m, half), t.column(group, tile))) =
              make_float2(x[2 * half] * scale, x[2 * half + 1] * scale);
        }
      }
    }
  }
  __syncthreads();
  const auto store_as = [&](auto* g_first) {
    constexpr int kSize = sizeof(*g_first);
    const bool vectors = strides.column == 1 && columns % 4 == 0 && strides.row % 4 == 0 &&
                         reinterpret_cast<std::uintptr_t>(g_first) % (4 * kSize) == 0;
    constexpr int kRowVec4s = C::kHeadDim / 4;
#pragma unroll 1
    for (int index = threadIdx.x; index < rows * kRowVec4s; index += C::kThreads) {
      const int row = index / kRowVec4s, column = 4 * (index % kRowVec4s);
      if (column >= columns) continue;
      const float4 four = *reinterpret_cast<const float4*>(s_rows + offset(row, column));
      const float x[4] = {four.x, four.y, four.z, four.w};
      store_columns(g_first + row * strides.row, strides.column, column, columns, x, vectors);
    }
  };
  if (element == core::Element::f32) {
    store_as(static_cast<float*>(g_data) + first);
  } else {
    store_as(static_cast<typename C::Element*>(g_data) + first);
  }
}

/// Stores the sums of a dbias tile. If dbias has one row, it is the sum of all rows.
template <typename C>
__device__ __forceinline__ void store_dbias(const AccPairs<C>& sum, BwdTiles<C>& s,
                                            const BackwardParams& p,
                                            const core::BackwardTile& tile) {
  static_assert(sizeof(s.a1) + sizeof(s.a2) >= sizeof(float) * C::kTile * C::kStep);
  auto* s_sum = reinterpret_cast<float(*)[C::kStep]>(s.a1);  // [tile, step], over a1 and a2
  const BwdThread<C> t(threadIdx.x);
  __syncthreads();  // all warps have read a1 and a2
#pragma unroll
  for (int m = 0; m < C::kPairRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kPairColumnTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s_sum[t.pair_row(m, i / 2)][t.pair_column(n, i % 2)] = sum[m][n][i];
      }
    }
  }
  __syncthreads();
  const std::int32_t first_row = tile.tile * C::kTile;
  const bool one_row = p.dbias_rows == 1;
  const int rows = one_row ? 1 : min(C::kTile, p.dbias_rows - first_row);
  const int keys = min(C::kStep, p.fwd.kv_len - tile.first_key);
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * C::kStep; i += C::kThreads) {
    const int row = i / C::kStep, key = i % C::kStep;
    if (key >= keys) continue;
    float x = s_sum[row][key];
    if (one_row) {
#pragma unroll 1
      for (int r = 1; r < C::kTile; ++r) x += s_sum[r][key];
    }
    const float four[4] = {x, 0.f, 0.f, 0.f};
    const std::int64_t at = core::row_offset(p.dbias_strides, tile.b, tile.head, first_row + row);
    store_columns(p.dbias, p.dbias_element, at + (tile.first_key + key) * p.dbias_strides.column, 0,
                  0, 1, four, false);
  }
}

}  // namespace flashcore::cuda::sm80
