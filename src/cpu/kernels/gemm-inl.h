// The GEMMs of the CPU kernel: S^T = K Q^T and O^T += V^T P^T for one panel of rows.
//
// Both multiply a scalar of K or V by vectors of rows, so K and V need no packing beyond the
// widening in load-inl.h. An instruction set with its own tile shapes or operand formats replaces
// score_panel() and value_panel(), and with them the layout that load-inl.h writes.
#pragma once

#include "cpu/kernels/simd.h"

namespace flashcore::cpu {
namespace {

// Register tile: kPanelVecs vectors of rows times kBroadcasts keys (or columns of V).
#if FLASHCORE_SIMD_BYTES == 64
inline constexpr int kPanelVecs = 2, kBroadcasts = 12;
#elif FLASHCORE_SIMD_BYTES == 32
inline constexpr int kPanelVecs = 2, kBroadcasts = 6;
#elif FLASHCORE_SIMD_BYTES == 16
inline constexpr int kPanelVecs = 4, kBroadcasts = 4;
#else
inline constexpr int kPanelVecs = 2, kBroadcasts = 4;
#endif

/// Keys per register tile. With one vector of rows there are registers for 12 keys, which hide the
/// latency of the additions.
template <int V>
inline constexpr int kBroadcastsOf = V == 1 ? 12 : kBroadcasts;

/// acc[m][v] = Σ_i scalars[m * scalar_stride + i * step_stride] * vectors[i][v].
template <int M, int V, typename T>
FLASHCORE_HD void multiply_accumulate(Vec<T> (&acc)[M][V], const T* scalars,
                                      std::int64_t scalar_stride, std::int64_t step_stride,
                                      const T* vectors, std::int32_t steps) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) acc[m][v] = splat(T(0));
  }
  for (std::int32_t i = 0; i < steps; ++i) {
    Vec<T> row[V];
    for (int v = 0; v < V; ++v) row[v] = load(vectors + v * kLanes<T>);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Vec<T> scalar = splat(scalars[m * scalar_stride]);
      for (int v = 0; v < V; ++v) acc[m][v] = acc[m][v] + scalar * row[v];
    }
    scalars += step_stride;
    vectors += V * kLanes<T>;
  }
}

/// scores[key][row] = K[key] · Q[row] for the keys of a tile and one panel of rows.
template <int V, typename T>
void score_panel(T* scores, const T* k_tile, const T* q_panel, std::int32_t keys,
                 std::int32_t head_dim) {
  constexpr int kRows = V * kLanes<T>;
  std::int32_t key = 0;
  const auto step = [&]<int M>() {
    Vec<T> acc[M][V];
    multiply_accumulate<M, V, T>(acc, k_tile + static_cast<std::int64_t>(key) * head_dim, head_dim,
                                 1, q_panel, head_dim);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < V; ++v) store(scores + (key + m) * kRows + v * kLanes<T>, acc[m][v]);
    }
    key += M;
  };
  while (key + kBroadcastsOf<V> <= keys) step.template operator()<kBroadcastsOf<V>>();
  while (key + 4 <= keys) step.template operator()<4>();
  while (key < keys) step.template operator()<1>();
}

/// out[column][row] = out[column][row] * rescale[row] + Σ_key V[key][column] P[key][row].
template <int V, typename T>
void value_panel(T* out_panel, const T* v_tile, const T* probabilities, const Vec<T> (&rescale)[V],
                 std::int32_t keys, std::int32_t v_dim) {
  constexpr int kRows = V * kLanes<T>;
  std::int32_t column = 0;
  const auto step = [&]<int M>() {
    Vec<T> acc[M][V];
    multiply_accumulate<M, V, T>(acc, v_tile + column, 1, v_dim, probabilities, keys);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < V; ++v) {
        T* out = out_panel + (column + m) * kRows + v * kLanes<T>;
        store(out, load(out) * rescale[v] + acc[m][v]);
      }
    }
    column += M;
  };
  while (column + kBroadcastsOf<V> <= v_dim) step.template operator()<kBroadcastsOf<V>>();
  while (column + 4 <= v_dim) step.template operator()<4>();
  while (column < v_dim) step.template operator()<1>();
}

}  // namespace
}  // namespace flashcore::cpu
