// The tile products of AMX: S^T = K Q^T and V^T P^T for one panel of rows (gemm_amx-inl.h).
//
// Tiles 0 … 3 accumulate (A index + 2 * B index), 4 and 5 hold A, 6 and 7 hold B.
#pragma once

#include <immintrin.h>

#include "cpu/kernels/amx_pack-inl.h"

namespace flashcore::cpu {
namespace {

/// The compiler does not know which memory the tile instructions read.
FLASHCORE_HD void fence_tile_memory() { __asm__ volatile("" ::: "memory"); }

/// All eight tiles have 16 rows of 64 bytes.
inline void configure_tiles() {
  struct alignas(64) TileConfig {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t row_bytes[16];
    std::uint8_t rows[16];
  } config = {};
  static_assert(sizeof config == 64);
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = kAmxRowBytes;
    config.rows[tile] = kAmxTileRows;
  }
  fence_tile_memory();
  _tile_loadconfig(&config);
}

template <int V>
FLASHCORE_HD void zero_accumulators() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (V == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

/// Multiplies 2 tiles, at `a` and `a + a_half`, with rows of a_row bytes, by the V tiles at `b`.
template <int V>
FLASHCORE_HD void multiply_tiles(const char* a, std::int64_t a_row, std::int64_t a_half,
                                 const char* b) {
  _tile_loadd(6, b, kAmxRowBytes);
  _tile_loadd(4, a, a_row);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, a + a_half, a_row);
  _tile_dpbf16ps(1, 5, 6);
  if constexpr (V == 2) {
    _tile_loadd(7, b + kAmxTileBytes, kAmxRowBytes);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

/// Loads the accumulators from one matrix: 32 rows of V vectors.
template <int V>
FLASHCORE_HD void load_accumulators(const float* from) {
  constexpr std::int64_t kStride = V * kAmxRowBytes;
  _tile_loadd(0, from, kStride);
  _tile_loadd(1, from + 16 * V * 16, kStride);
  if constexpr (V == 2) {
    _tile_loadd(2, from + 16, kStride);
    _tile_loadd(3, from + 16 * V * 16 + 16, kStride);
  }
}

/// Stores the accumulators as one matrix: 32 rows of V vectors.
template <int V>
FLASHCORE_HD void store_accumulators(float* to) {
  constexpr std::int64_t kStride = V * kAmxRowBytes;
  _tile_stored(0, to, kStride);
  _tile_stored(1, to + 16 * V * 16, kStride);
  if constexpr (V == 2) {
    _tile_stored(2, to + 16, kStride);
    _tile_stored(3, to + 16 * V * 16 + 16, kStride);
  }
}

/// Adds the products of all parts over `steps` steps: 2 tiles of A by V tiles of B each. The first
/// parts of both come last, when the sum of the others is complete: it is below 2^-7 of the whole,
/// and so are its roundings.
template <int V, int kA, int kB>
FLASHCORE_HD void multiply_parts(const AmxTilePairs& a, const char* b, std::int64_t b_part,
                                 std::int64_t steps) {
  constexpr std::int64_t kStep = V * kAmxTileBytes;
  if constexpr (kA > 1 || kB > 1) {
    for (std::int64_t i = 0; i < steps; ++i) {
      for_small_products<kA, kB>([&](int part_a, int part_b) {
        multiply_tiles<V>(a.data + part_a * a.part + i * a.step, a.row, a.half,
                          b + part_b * b_part + i * kStep);
      });
    }
  }
  for (std::int64_t i = 0; i < steps; ++i) {
    multiply_tiles<V>(a.data + i * a.step, a.row, a.half, b + i * kStep);
  }
}

/// The scores of 32 keys: S^T = K Q^T.
template <typename Storage, int V>
FLASHCORE_HD void multiply_qk(float* scores, const AmxTilePairs& k, const char* q,
                              std::int64_t d_tiles) {
  constexpr int kParts = AmxFormat<Storage>::kParts;
  zero_accumulators<V>();
  multiply_parts<V, kParts, kParts>(k, q, d_tiles * V * kAmxTileBytes, d_tiles);
  store_accumulators<V>(scores);
}

/// The tiles of V and P of a panel and a KV tile.
struct AmxPvTiles {
  const char *v, *p;
  std::int64_t v_part, p_part;  // bytes to the next part
  std::int64_t blocks;          // of 32 keys

  AmxTilePairs column(std::int64_t index, int parts) const {
    return {v + index * parts * v_part, kAmxRowBytes, kAmxTileBytes, 2 * kAmxTileBytes, v_part};
  }
};

/// Adds V^T P^T to a panel's output, which is in the format of the accumulators.
template <int V>
void add_pv(float* out, const AmxPvTiles& t, std::int64_t v_tiles) {
  fence_tile_memory();
  for (std::int64_t column = 0; column < v_tiles; ++column) {
    load_accumulators<V>(out);
    multiply_parts<V, 1, 1>(t.column(column, 1), t.p, 0, t.blocks);
    store_accumulators<V>(out);
    out += 32 * V * kAmxTileRows;
  }
  fence_tile_memory();
}

/// out = out * rescale + the 32 columns of `sum`.
template <int V>
FLASHCORE_HD void add_columns(float* out, const float* sum, const Vec<float> (&rescale)[V]) {
  for (int i = 0; i < 32 * V; ++i) {
    store(out + i * kLanes<float>,
          mul_add(load(out + i * kLanes<float>), rescale[i % V], load(sum + i * kLanes<float>)));
  }
}

/// The same in parts, with a sum of its own for the KV tile: O^T = O^T * rescale + V^T P^T.
/// `sums` holds the columns of two steps.
template <typename Storage, int V>
void add_pv_in_parts(float* out, const AmxPvTiles& t, std::int64_t v_tiles,
                     const Vec<float> (&rescale)[V], float* sums) {
  using Format = AmxFormat<Storage>;
  constexpr std::int64_t kColumns = 32 * V * kAmxTileRows;
  fence_tile_memory();
  for (std::int64_t column = 0; column < v_tiles; ++column) {
    zero_accumulators<V>();
    multiply_parts<V, Format::kParts, Format::kWeightParts>(t.column(column, Format::kParts), t.p,
                                                            t.p_part, t.blocks);
    store_accumulators<V>(sums + column % 2 * kColumns);
    fence_tile_memory();
    // One step behind, so that no load waits for a tile.
    if (column > 0) {
      add_columns<V>(out + (column - 1) * kColumns, sums + (column - 1) % 2 * kColumns, rescale);
    }
  }
  add_columns<V>(out + (v_tiles - 1) * kColumns, sums + (v_tiles - 1) % 2 * kColumns, rescale);
}

}  // namespace
}  // namespace flashcore::cpu
