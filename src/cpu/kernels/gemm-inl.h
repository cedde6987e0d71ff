// The GEMMs of the CPU kernel: S^T = K Q^T and O^T += V^T P^T for one panel of rows, on packed
// tiles.
//
// A GEMM policy brings the tile shapes and operand formats of an instruction set. fwd-inl.h calls
// it for every work tile, KV tile and panel of V vectors of rows:
//
//   Compute                the type of scores, P before it is packed, row statistics and output
//   kOperands              the format of packed operands, for the scratch memory
//   kPanelVecs             vectors of rows in a panel; tiles of few rows use panels of one vector
//   kKeyStep               a KV tile starts at a multiple of it
//   begin(), end()         state of the calling thread around a work tile
//   pack_q<V>(work)                       Q of the work tile
//   pack_k(work, k, map, tile, visible)   keys of a KV tile; those not in `visible` are never read
//   pack_v(...)                           the same for V; not `visible`: 0, because 0 * NaN is NaN
//   process_panels<V>(work, panels, tile)   scores, softmax and output of all panels for a KV tile
//
// process_panels() calls the functions of score-inl.h between its GEMMs.
//
// FmaGemm is the policy of vector units: both GEMMs multiply a scalar of K or V by vectors of rows,
// so K and V need no packing beyond widening, and P stays where the scores were.
#pragma once

#include "core/scratch.h"
#include "cpu/kernels/load-inl.h"
#include "cpu/kernels/score-inl.h"
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
      for (int v = 0; v < V; ++v) acc[m][v] = mul_add(scalar, row[v], acc[m][v]);
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
        store(out, mul_add(load(out), rescale[v], acc[m][v]));
      }
    }
    column += M;
  };
  while (column + kBroadcastsOf<V> <= v_dim) step.template operator()<kBroadcastsOf<V>>();
  while (column + 4 <= v_dim) step.template operator()<4>();
  while (column < v_dim) step.template operator()<1>();
}

/// P = exp(S - base) in place, and its sums.
template <int V, typename T>
void exponentiate_panel(T* scores, std::int32_t keys, const PanelSoftmax<V, T>& softmax, T* sum) {
  for (int v = 0; v < V; ++v) {
    const Vec<T> log2_e = splat(static_cast<T>(core::kLog2E));
    Vec<T> tile_sum = splat(T(0));
    for (std::int32_t key = 0; key < keys; ++key) {
      T* s = scores + (key * V + v) * kLanes<T>;
      const Vec<T> p = exp2((load(s) - softmax.base[v]) * log2_e);
      store(s, p);
      tile_sum = tile_sum + p;
    }
    add_to_sum(sum + v * kLanes<T>, softmax.rescale[v], tile_sum);
  }
}

/// Operands in the compute type T; Q, K and V are stored as Storage.
template <typename T, typename Storage>
struct FmaGemm {
  using Compute = T;
  static constexpr core::CpuOperands kOperands = core::CpuOperands::compute;
  static constexpr int kPanelVecs = cpu::kPanelVecs;
  static constexpr std::int32_t kKeyStep = 1;

  static void begin() {}
  static void end() {}

  template <int V>
  static void pack_q(const WorkTile<T>& work) {
    load_queries<T, Storage>(static_cast<T*>(work.q_tile), work, V * kLanes<T>);
  }
  static void pack_k(const WorkTile<T>& work, const KeyTensor& k, const core::KvRowMap& kv_row_map,
                     KeyRange tile, KeyRange) {
    load_tile<T, Storage>(static_cast<T*>(work.k_tile), k, work, kv_row_map, tile);
  }
  static void pack_v(const WorkTile<T>& work, const KeyTensor& v, const core::KvRowMap& kv_row_map,
                     KeyRange tile, KeyRange) {
    load_tile<T, Storage>(static_cast<T*>(work.v_tile), v, work, kv_row_map, tile);
  }
  template <int V>
  static void process_panels(const WorkTile<T>& work, std::int32_t panels, KeyRange tile) {
    const AttentionParams& p = work.params;
    constexpr int kRows = V * kLanes<T>;
    const std::int32_t keys = tile.end - tile.begin;
    const T* k_tile = static_cast<const T*>(work.k_tile);
    const T* v_tile = static_cast<const T*>(work.v_tile);
    for (std::int32_t panel = 0; panel < panels; ++panel) {
      const std::int32_t row = panel * kRows;
      score_panel<V>(work.scores, k_tile, static_cast<const T*>(work.q_tile) + row * p.head_dim,
                     keys, p.head_dim);
      apply_mods_and_mask<V>(work, work.scores, row, tile);
      const PanelSoftmax<V, T> softmax = update_max<V>(work.scores, keys, work.max + row, p.fault);
      exponentiate_panel<V>(work.scores, keys, softmax, work.sum + row);
      value_panel<V>(work.out_tile + row * p.v_dim, v_tile, work.scores, softmax.rescale, keys,
                     p.v_dim);
    }
  }
};

}  // namespace
}  // namespace flashcore::cpu
