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

/// Calls use<M>(first) for blocks of M of `count` keys or columns: kLargest, then 8, 4, 2 and 1.
template <int kLargest, typename Use>
FLASHCORE_HD void for_blocks(std::int32_t count, Use use) {
  std::int32_t first = 0;
  const auto block = [&]<int M>() {
    for (; first + M <= count; first += M) use.template operator()<M>(first);
  };
  block.template operator()<kLargest>();
  if constexpr (kLargest > 8) block.template operator()<8>();
  if constexpr (kLargest > 4) block.template operator()<4>();
  block.template operator()<2>();
  block.template operator()<1>();
}

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
void score_panel(T* scores, AdjacentKeys<T> k, const T* q_panel, std::int32_t keys,
                 std::int32_t head_dim) {
  constexpr int kRows = V * kLanes<T>;
  for_blocks<kBroadcastsOf<V>>(keys, [&]<int M>(std::int32_t key) {
    Vec<T> acc[M][V];
    multiply_accumulate<M, V, T>(acc, k.data + key * k.stride, k.stride, 1, q_panel, head_dim);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < V; ++v) store(scores + (key + m) * kRows + v * kLanes<T>, acc[m][v]);
    }
  });
}

/// out[column][row] = out[column][row] * rescale[row] + Σ_key V[key][column] P[key][row].
template <int V, typename T>
void value_panel(T* out_panel, AdjacentKeys<T> values, const T* probabilities,
                 const Vec<T> (&rescale)[V], std::int32_t keys, std::int32_t v_dim) {
  constexpr int kRows = V * kLanes<T>;
  for_blocks<kBroadcastsOf<V>>(v_dim, [&]<int M>(std::int32_t column) {
    Vec<T> acc[M][V];
    multiply_accumulate<M, V, T>(acc, values.data + column, 1, values.stride, probabilities, keys);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < V; ++v) {
        T* out = out_panel + (column + m) * kRows + v * kLanes<T>;
        store(out, mul_add(load(out), rescale[v], acc[m][v]));
      }
    }
  });
}

/// P = exp(S - base) in place, and its sums.
template <int V, typename T>
void exponentiate_panel(T* scores, std::int32_t keys, const PanelSoftmax<V, T>& softmax, T* sum) {
  for (int v = 0; v < V; ++v) {
    Vec<T> tile_sum = splat(T(0));
    for (std::int32_t key = 0; key < keys; ++key) {
      T* s = scores + (key * V + v) * kLanes<T>;
      const Vec<T> p = exp<T>(load(s) - softmax.base[v]);
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
    pack(static_cast<T*>(work.k_tile), k, work, kv_row_map, tile);
  }
  static void pack_v(const WorkTile<T>& work, const KeyTensor& v, const core::KvRowMap& kv_row_map,
                     KeyRange tile, KeyRange) {
    pack(static_cast<T*>(work.v_tile), v, work, kv_row_map, tile);
  }
  template <int V>
  static void process_panels(const WorkTile<T>& work, std::int32_t panels, KeyRange tile) {
    const AttentionParams& p = work.params;
    constexpr std::int32_t kRows = V * kLanes<T>;
    const core::KvRowMap map = core::kv_row_map(p, work.sequence, work.b);
    const auto k = rows_of_tile<T, Storage>(static_cast<T*>(work.k_tile), k_tensor(p), work.kv_head,
                                            map, tile);
    const auto v = rows_of_tile<T, Storage>(static_cast<T*>(work.v_tile), v_tensor(p), work.kv_head,
                                            map, tile);
    for (std::int32_t row = 0; row < panels * kRows; row += kRows) {
      // Keys that no row of the panel sees have P = 0.
      const std::int32_t last_row = (row + kRows < work.rows ? row + kRows : work.rows) - 1;
      const KeyRange part = core::intersect(
          tile,
          core::keys_seen_by_any(work.sequence.mask, work.query_of(row), work.query_of(last_row)));
      if (part.empty()) continue;
      const std::int32_t keys = part.end - part.begin, skipped = part.begin - tile.begin;
      score_panel<V>(work.scores, {k.data + skipped * k.stride, k.stride},
                     static_cast<const T*>(work.q_tile) + row * p.head_dim, keys, p.head_dim);
      apply_mods_and_mask<V>(work, work.scores, row, part);
      const PanelSoftmax<V, T> softmax = update_max<V>(work.scores, keys, work.max + row, p.fault);
      exponentiate_panel<V>(work.scores, keys, softmax, work.sum + row);
      value_panel<V>(work.out_tile + row * p.v_dim, {v.data + skipped * v.stride, v.stride},
                     work.scores, softmax.rescale, keys, p.v_dim);
    }
  }

 private:
  static void pack(T* packed, const KeyTensor& t, const WorkTile<T>& work,
                   const core::KvRowMap& kv_row_map, KeyRange tile) {
    if (rows_of_tile<T, Storage>(packed, t, work.kv_head, kv_row_map, tile).data != packed) return;
    load_tile<T, Storage>(packed, t, work, kv_row_map, tile);
  }
};

}  // namespace
}  // namespace flashcore::cpu
