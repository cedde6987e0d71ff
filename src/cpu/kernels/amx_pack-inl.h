// Packs Q, K and V into the tiles of AMX (gemm_amx-inl.h), whole or in parts (amx_parts-inl.h).
#pragma once

#include "cpu/kernels/amx_parts-inl.h"
#include "cpu/kernels/load-inl.h"

namespace flashcore::cpu {
namespace {

/// NaN in place of elements whose products may overflow or mix infinities with other values: not
/// below 2^58. Scores of NaN are computed again (amx_exact-inl.h).
FLASHCORE_HD __m512 hide_huge(__m512 x) {
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
  const __mmask16 huge = _mm512_cmpge_epi32_mask(magnitude, _mm512_set1_epi32((127 + 58) << 23));
  return _mm512_mask_mov_ps(x, huge, _mm512_set1_ps(__builtin_nanf("")));
}

/// Numbers of V that split() can take: the nearest bf16 to the largest numbers would be infinity.
/// An infinity stays one, or becomes NaN, in some part.
FLASHCORE_HD __m512 first_part_of_v(__m512 x) {
  // x86's minimum and maximum are their second operand if one is NaN.
  const __m512 largest = _mm512_set1_ps(0x1.fep127f);
  const __m512 least = _mm512_set1_ps(-0x1.fep127f);
  return nearest_bf16(_mm512_maskz_min_ps(kAll16, largest, _mm512_maskz_max_ps(kAll16, least, x)));
}

FLASHCORE_HD void transpose_floats(__m512 (&m)[16]) {
  __m512i bits[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) bits[i] = _mm512_castps_si512(m[i]);
  transpose_16x16(bits);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) m[i] = _mm512_castsi512_ps(bits[i]);
}

/// A tile of Q^T: 32 columns of 16 rows, times a power of two.
template <typename Storage>
FLASHCORE_HD void pack_q_tile(char* to, std::int64_t part_stride, const AmxRow<Storage>* rows,
                              std::int32_t first, std::int32_t columns, __m512 power) {
  if constexpr (kIsSame<Storage, Bf16>) {
    __m512i m[kAmxTileRows];
    for (int r = 0; r < kAmxTileRows; ++r) {
      m[r] = multiply_pairs(rows[r].load(first, columns).values, power);
    }
    transpose_16x16(m);
    for (int pair = 0; pair < 16; ++pair) _mm512_store_si512(to + pair * kAmxRowBytes, m[pair]);
  } else {
    constexpr int kParts = AmxFormat<Storage>::kParts;
    __m512 low[kAmxTileRows], high[kAmxTileRows];
    for (int r = 0; r < kAmxTileRows; ++r) {
      const AmxColumns<Storage> c = rows[r].load(first, columns);
      low[r] = c.low, high[r] = c.high;
    }
    transpose_floats(low);
    transpose_floats(high);
    for (int pair = 0; pair < 16; ++pair) {
      __m512i part[kParts];
      split(hide_huge(_mm512_mul_ps(low[pair], power)), hide_huge(_mm512_mul_ps(high[pair], power)),
            part, nearest_bf16);
      for (int i = 0; i < kParts; ++i) {
        _mm512_store_si512(to + i * part_stride + pair * kAmxRowBytes, part[i]);
      }
    }
  }
}

/// [panel][part][head_dim / 32][vector]
template <typename Storage, int V>
void pack_amx_q(const WorkTile<float>& work) {
  const AttentionParams& p = work.params;
  const __m512 power = _mm512_set1_ps(AmxQScale(core::score_scale<float>(p)).power);
  const std::int32_t vectors = (work.rows + V * kAmxTileRows - 1) / (V * kAmxTileRows) * V;
  const std::int64_t tiles = amx_dim_tiles(p.head_dim);
  const std::int64_t part_stride = tiles * V * kAmxTileBytes;
  const std::int32_t columns = p.head_dim - (p.fault.is(InjectedFault::head_dim_truncated) ? 1 : 0);
  for (std::int32_t vector = 0; vector < vectors; ++vector) {
    AmxRow<Storage> rows[kAmxTileRows];
    for (int r = 0; r < kAmxTileRows; ++r) {
      const std::int32_t row = vector * kAmxTileRows + r;
      rows[r] = {nullptr, p.q_strides.column};
      if (row >= work.rows) continue;
      rows[r].data = static_cast<const Storage*>(p.q) +
                     core::row_offset(p.q_strides, work.b, work.head_of(row),
                                      work.sequence.q_row + work.query_of(row));
    }
    char* to = static_cast<char*>(work.q_tile) +
               vector / V * AmxFormat<Storage>::kParts * part_stride + vector % V * kAmxTileBytes;
    for (std::int64_t tile = 0; tile < tiles; ++tile, to += V * kAmxTileBytes) {
      pack_q_tile(to, part_stride, rows, static_cast<std::int32_t>(tile) * 32, columns, power);
    }
  }
}

/// Rows of 32 keys from `first` on; null if not `visible`.
template <typename Storage>
struct AmxKeyRows {
  AmxRow<Storage> row[kAmxKeyStep];
  bool whole;  // no row and no column is padding

  AmxKeyRows(const WorkTile<float>& work, const KeyTensor& t, const core::KvRowMap& kv_row_map,
             std::int32_t first, KeyRange visible) {
    for (AmxRow<Storage>& r : row) r = {nullptr, t.strides.column};
    const KeyRange keys = core::intersect(visible, {first, first + kAmxKeyStep});
    const Storage* g_head = static_cast<const Storage*>(t.g_data) + work.kv_head * t.strides.head;
    for_each_key(
        g_head, t.strides, kv_row_map, keys.begin, keys.end - keys.begin,
        [&](std::int32_t, const Storage* from, std::int32_t key) { row[key - first].data = from; });
    whole = keys.end - keys.begin == kAmxKeyStep && t.strides.column == 1 &&
            t.columns % core::kBf16TileDim == 0;
  }
};

/// Copies 32 keys to the tiles at `to`: [part][head_dim / 32][2].
template <bool kWhole, typename Storage>
void copy_keys(char* to, const AmxKeyRows<Storage>& keys, std::int64_t tiles,
               std::int32_t columns) {
  constexpr int kParts = AmxFormat<Storage>::kParts;
  for (int key = 0; key < kAmxKeyStep; ++key) {
    char* to_row = to + key * kAmxRowBytes;
    for (std::int32_t t = 0; t < tiles; ++t) {
      const AmxColumns<Storage> c = keys.row[key].template load<kWhole>(t * 32, columns);
      __m512i part[kParts];
      if constexpr (kParts == 1) {
        part[0] = c.values;
      } else {
        split(hide_huge(c.low), hide_huge(c.high), part, nearest_bf16);
      }
#pragma GCC unroll 3
      for (int i = 0; i < kParts; ++i) {
        _mm512_store_si512(to_row + (i * tiles + t) * 2 * kAmxTileBytes, part[i]);
      }
    }
  }
}

/// Pairs of tiles in memory. A pair has 32 rows, of keys or columns.
struct AmxTilePairs {
  const char* data;
  std::int64_t row, half;   // bytes from a row to the next one, and from the first to the 17th
  std::int64_t step, part;  // bytes to the next pair of a sum, and to the next part
};

/// The tiles of K of a KV tile: those that pack_amx_k() wrote, or K itself where it is bf16 and its
/// rows are adjacent. Rows of up to 256 bytes: 32 of them have 32 different sets of the L1 cache
/// for each column.
struct AmxKTiles {
  AmxTilePairs first;  // 32 keys
  std::int64_t block;  // bytes to the next 32 keys
  bool in_place;

  AmxTilePairs keys(std::int64_t index) const {
    AmxTilePairs pairs = first;
    pairs.data += index * block;
    return pairs;
  }

  AmxKTiles(const WorkTile<float>& work, const core::KvRowMap& map, KeyRange tile, KeyRange visible,
            int parts) {
    constexpr std::int64_t kMaxRowBytes = 256;
    const AttentionParams& p = work.params;
    const core::Strides& strides = p.k_strides;
    const std::int32_t keys = tile.end - tile.begin;
    in_place = parts == 1 && tile.begin >= visible.begin && keys % kAmxKeyStep == 0 &&
               map.run_from(tile.begin) >= keys && strides.column == 1 &&
               strides.row == p.head_dim && p.head_dim % core::kBf16TileDim == 0 &&
               2 * p.head_dim <= kMaxRowBytes;
    if (in_place) {
      const core::KvLocation at = map.at(tile.begin);
      const std::int64_t row = 2 * strides.row;
      first = {reinterpret_cast<const char*>(static_cast<const Bf16*>(p.k) +
                                             core::row_offset(strides, at, work.kv_head)),
               row, 16 * row, kAmxRowBytes, 0};
      block = 32 * row;
    } else {
      const std::int64_t part = 2 * kAmxTileBytes * amx_dim_tiles(p.head_dim);
      first = {static_cast<const char*>(work.k_tile), kAmxRowBytes, kAmxTileBytes,
               2 * kAmxTileBytes, part};
      block = parts * part;
    }
  }
};

/// [keys / 32][part][head_dim / 32][2]
template <typename Storage>
void pack_amx_k(const WorkTile<float>& work, const KeyTensor& k, const core::KvRowMap& kv_row_map,
                KeyRange tile, KeyRange visible) {
  constexpr int kParts = AmxFormat<Storage>::kParts;
  const AmxKTiles k_tiles(work, kv_row_map, tile, visible, kParts);
  if (k_tiles.in_place) return;
  const std::int64_t tiles = amx_dim_tiles(k.columns);
  char* to = static_cast<char*>(work.k_tile);
  for (std::int32_t first = tile.begin; first < tile.end; first += kAmxKeyStep) {
    const AmxKeyRows<Storage> keys(work, k, kv_row_map, first, visible);
    keys.whole ? copy_keys<true>(to, keys, tiles, k.columns)
               : copy_keys<false>(to, keys, tiles, k.columns);
    to += k_tiles.block;
  }
}

/// Transposes 32 columns of 32 keys to two tiles of V^T. row(key) has a key's columns in bf16.
template <typename Row>
FLASHCORE_HD void transpose_keys(char* to, Row row) {
  for (int half = 0; half < 2; ++half) {
    __m512i m[16];  // [pair of keys][column], pairs interleaved within 128-bit lanes
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      const __m512i even = row(2 * pair), odd = row(2 * pair + 1);
      m[pair] = half == 0 ? _mm512_unpacklo_epi16(even, odd) : _mm512_unpackhi_epi16(even, odd);
    }
    transpose_16x16(m);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const int column = i / 4 * 8 + half * 4 + i % 4;  // element i % 4 of 128-bit lane i / 4
      _mm512_store_si512(to + column * kAmxRowBytes, m[i]);
    }
  }
}

/// The columns [first, first + 32) of 32 keys, in parts.
template <bool kWhole, typename Storage>
void transpose_columns(char* to, std::int64_t part_stride, const AmxKeyRows<Storage>& keys,
                       std::int32_t first, std::int32_t columns) {
  if constexpr (kIsSame<Storage, Bf16>) {
    transpose_keys(
        to, [&](int key) { return keys.row[key].template load<kWhole>(first, columns).values; });
  } else {
    constexpr int kParts = AmxFormat<Storage>::kParts;
    __m512 m[2][2][16];  // [columns][keys], 16 of each, of 16 keys or columns
    for (int key = 0; key < kAmxKeyStep; ++key) {
      const AmxColumns<Storage> c = keys.row[key].template load<kWhole>(first, columns);
      m[0][key / 16][key % 16] = c.low;
      m[1][key / 16][key % 16] = c.high;
    }
    for (int half = 0; half < 2; ++half) {
      transpose_floats(m[half][0]);
      transpose_floats(m[half][1]);
      for (int column = 0; column < 16; ++column) {
        __m512i part[kParts];
        split(m[half][0][column], m[half][1][column], part, first_part_of_v);
        for (int i = 0; i < kParts; ++i) {
          _mm512_store_si512(to + i * part_stride + (half * 16 + column) * kAmxRowBytes, part[i]);
        }
      }
    }
  }
}

/// The same for 32 keys whose rows have equal distances and need no conversion.
inline void transpose_adjacent(char* to, const Bf16* first, std::int64_t stride) {
  transpose_keys(to, [&](int key) { return _mm512_loadu_si512(first + key * stride); });
}

/// [v_dim / 32][part][keys / 32][2]
template <typename Storage>
void pack_amx_v(const WorkTile<float>& work, const KeyTensor& v, const core::KvRowMap& kv_row_map,
                KeyRange tile, KeyRange visible) {
  constexpr int kParts = AmxFormat<Storage>::kParts;
  const std::int64_t blocks = amx_key_blocks(tile.end - tile.begin);
  const std::int64_t part_stride = blocks * 2 * kAmxTileBytes;
  char* to = static_cast<char*>(work.v_tile);
  for (std::int64_t block = 0; block < blocks; ++block, to += 2 * kAmxTileBytes) {
    const std::int32_t first = tile.begin + static_cast<std::int32_t>(block) * kAmxKeyStep;
    const AmxKeyRows<Storage> keys(work, v, kv_row_map, first, visible);
    const bool is_adjacent = keys.whole && kv_row_map.run_from(first) >= kAmxKeyStep;
    for (std::int32_t column = 0; column < v.columns; column += 32) {
      char* to_tiles = to + column / 32 * kParts * part_stride;
      if constexpr (kParts == 1) {
        if (is_adjacent) {
          transpose_adjacent(to_tiles, keys.row[0].data + column, v.strides.row);
          continue;
        }
      }
      keys.whole ? transpose_columns<true>(to_tiles, part_stride, keys, column, v.columns)
                 : transpose_columns<false>(to_tiles, part_stride, keys, column, v.columns);
    }
  }
}

}  // namespace
}  // namespace flashcore::cpu
