// The GEMM of the CPU kernels for gradients: C[m][n] = Σ_i A[m][i] B[i][n]. Scalars of A, with any
// strides, multiply vectors of B. A result's terms are added in the order of i, whatever the block
// that it belongs to, so its bits do not depend on its neighbours.
#pragma once

#include "cpu/kernels/simd.h"

namespace flashcore::cpu {
namespace {

// Register block: scalars of A times vectors of B.
#if FLASHCORE_SIMD_BYTES == 64
inline constexpr int kGemmScalars = 12, kGemmVecs = 2;
#elif FLASHCORE_SIMD_BYTES == 32
inline constexpr int kGemmScalars = 6, kGemmVecs = 2;
#elif FLASHCORE_SIMD_BYTES == 16
inline constexpr int kGemmScalars = 4, kGemmVecs = 4;
#else
inline constexpr int kGemmScalars = 4, kGemmVecs = 2;
#endif

/// A matrix operand: element (m, i) is data[m * row + i * step].
template <typename T>
struct Scalars {
  const T* data;
  std::int64_t row, step;
};

/// Rows of vectors: row i starts at data + i * row.
template <typename T>
struct Rows {
  T* data;
  std::int64_t row;
};

/// One register block. kAdd: adds to C; otherwise overwrites it.
template <bool kAdd, int M, int V, typename T>
FLASHCORE_HD void gemm_block(T* c, std::int64_t c_row, const T* a, std::int64_t a_row,
                             std::int64_t a_step, const T* b, std::int64_t b_row,
                             std::int32_t steps) {
  Vec<T> acc[M][V];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) acc[m][v] = splat(T(0));
  }
  for (std::int32_t i = 0; i < steps; ++i) {
    Vec<T> row[V];
    for (int v = 0; v < V; ++v) row[v] = load(b + v * kLanes<T>);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Vec<T> scalar = splat(a[m * a_row]);
      for (int v = 0; v < V; ++v) acc[m][v] = mul_add(scalar, row[v], acc[m][v]);
    }
    a += a_step;
    b += b_row;
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) {
      T* to = c + m * c_row + v * kLanes<T>;
      store(to, kAdd ? load(to) + acc[m][v] : acc[m][v]);
    }
  }
}

template <bool kAdd, int V, typename T>
void gemm_columns(T* c, std::int64_t c_row, const Scalars<T>& a, const T* b, std::int64_t b_row,
                  std::int32_t count, std::int32_t steps) {
  std::int32_t m = 0;
  const auto block = [&]<int M>() {
    gemm_block<kAdd, M, V, T>(c + m * c_row, c_row, a.data + m * a.row, a.row, a.step, b, b_row,
                              steps);
    m += M;
  };
  while (m + kGemmScalars <= count) block.template operator()<kGemmScalars>();
  while (m + 4 <= count) block.template operator()<4>();
  while (m < count) block.template operator()<1>();
}

/// c[m][n] (+)= Σ_i a(m, i) b[i][n] for m < count, i < steps and `vecs` vectors of columns.
template <bool kAdd, typename T>
void gemm(const Rows<T>& c, const Scalars<T>& a, const Rows<T>& b, std::int32_t count,
          std::int32_t vecs, std::int32_t steps) {
  std::int32_t v = 0;
  for (; v + kGemmVecs <= vecs; v += kGemmVecs) {
    gemm_columns<kAdd, kGemmVecs>(c.data + v * kLanes<T>, c.row, a, b.data + v * kLanes<T>, b.row,
                                  count, steps);
  }
  for (; v < vecs; ++v) {
    gemm_columns<kAdd, 1>(c.data + v * kLanes<T>, c.row, a, b.data + v * kLanes<T>, b.row, count,
                          steps);
  }
}

}  // namespace
}  // namespace flashcore::cpu
