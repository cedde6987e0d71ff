// Stores gradients: dQ, dK and dV from accumulators, dbias from sums of pairs.
#pragma once

#include "core/row_offset.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/memory.cuh"
#include "cuda/sm80/bwd_config.cuh"

namespace flashcore::cuda::sm80 {

/// Two adjacent elements, aligned to their size.
template <typename T>
struct alignas(2 * sizeof(T)) Pair {
  T x[2];
};

/// Stores acc * scale to rows [0, rows) from g_first on.
template <typename C, typename T>
__device__ __forceinline__ void store_gradient_as(const AccGradient<C>& acc, T* g_first,
                                                  const core::Strides& strides, int rows,
                                                  int columns, float scale) {
  const BwdThread<C> t(threadIdx.x);
  const bool pairs = strides.column == 1 && columns % 2 == 0 && strides.row % 2 == 0 &&
                     reinterpret_cast<std::uintptr_t>(g_first) % sizeof(Pair<T>) == 0;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = t.row(m, half);
      if (row >= rows) continue;
      T* g_row = g_first + row * strides.row;
#pragma unroll
      for (int group = 0; group < C::kGroups; ++group) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const int column = t.column(group, tile);
          if (column >= columns) continue;
          Pair<T> x;
          from_float(x.x[0], acc[m][group][tile][2 * half] * scale);
          from_float(x.x[1], acc[m][group][tile][2 * half + 1] * scale);
          if (pairs) {
            *reinterpret_cast<Pair<T>*>(g_row + column) = x;
          } else {
            g_row[column * strides.column] = x.x[0];
            if (column + 1 < columns) g_row[(column + 1) * strides.column] = x.x[1];
          }
        }
      }
    }
  }
}

/// The same for a gradient in q's type or f32, whose row 0 is element `first`.
template <typename C>
__device__ __forceinline__ void store_gradient(const AccGradient<C>& acc, void* g_data,
                                               core::Element element, std::int64_t first,
                                               const core::Strides& strides, int rows, int columns,
                                               float scale) {
  using T = typename C::Element;
  if (element == core::Element::f32) {
    store_gradient_as<C>(acc, static_cast<float*>(g_data) + first, strides, rows, columns, scale);
  } else {
    store_gradient_as<C>(acc, static_cast<T*>(g_data) + first, strides, rows, columns, scale);
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
