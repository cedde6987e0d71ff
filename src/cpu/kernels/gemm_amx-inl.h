// The GEMM policy of AMX: bf16 matrix tiles with f32 accumulators (gemm-inl.h).
//
// TDPBF16PS adds A[16][32] B[32][16] to C[16][16]. Packed operands are such tiles of 1 KiB, 16 rows
// of 64 bytes. Both GEMMs compute transposed results, so query rows stay in the lanes:
//
//   S^T = K Q^T        A = K    [16 keys][32 d]       as in memory
//                      B = Q^T  [16 pairs of d][16 rows][2]
//   O^T = V^T P^T      A = V^T  [16 columns][32 keys]
//                      B = P^T  [16 pairs of keys][16 rows][2]   lane-wise from S^T
//
//   q_tile  [panel][head_dim / 32][vector]     k_tile  [keys / 32][head_dim / 32][2]
//   p_tile  [keys / 32][vector]                v_tile  [v_dim / 32][keys / 32][2]
//
// A step multiplies 2 tiles of A by the tiles of a panel's vectors of B. Both are adjacent, and so
// are those of the next step.
//
// Padding is 0 in every operand: P of keys past the end, V of keys that no row sees, dims up to a
// multiple of 32.
#pragma once

#include <immintrin.h>

#include "cpu/kernels/gemm-inl.h"

namespace flashcore::cpu {
namespace {

struct AmxGemm {
  using Compute = float;
  static constexpr core::CpuOperands kOperands = core::CpuOperands::bf16_tiles;
  static constexpr int kPanelVecs = 2;
  static constexpr std::int32_t kKeyStep = 32;  // keys of a tile of V^T or P^T

  static constexpr std::int64_t kTileBytes = 1024;
  static constexpr int kTileRows = 16, kRowBytes = 64;

  static void begin();
  static void end() { _tile_release(); }

  template <int V>
  static void pack_q(const WorkTile<float>& work);
  static void pack_k(const WorkTile<float>& work, const KeyTensor& k,
                     const core::KvRowMap& kv_row_map, KeyRange tile, KeyRange visible);
  static void pack_v(const WorkTile<float>& work, const KeyTensor& v,
                     const core::KvRowMap& kv_row_map, KeyRange tile, KeyRange visible);
  template <int V>
  static void process_panels(const WorkTile<float>& work, std::int32_t panels, KeyRange tile);

  static std::int64_t key_blocks(std::int32_t keys) { return (keys + kKeyStep - 1) / kKeyStep; }
  static std::int64_t dim_tiles(std::int64_t dim) {
    return core::padded_dim(kOperands, dim) / core::kBf16TileDim;
  }
};

/// The compiler does not know which memory the tile instructions read.
FLASHCORE_HD void fence_tile_memory() { __asm__ volatile("" ::: "memory"); }

/// All eight tiles have 16 rows of 64 bytes.
void AmxGemm::begin() {
  struct alignas(64) TileConfig {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t row_bytes[16];
    std::uint8_t rows[16];
  } config = {};
  static_assert(sizeof config == 64);
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = kRowBytes;
    config.rows[tile] = kTileRows;
  }
  fence_tile_memory();
  _tile_loadconfig(&config);
}

/// A row of bf16 in memory; null: zeros.
struct Bf16Row {
  const Bf16* data;
  std::int64_t column_stride;

  /// Columns [first, first + 32), 0 from `columns` on. kWhole: all of them are in memory, adjacent.
  template <bool kWhole = false>
  FLASHCORE_HD __m512i load(std::int32_t first, std::int32_t columns) const {
    if constexpr (kWhole) return _mm512_loadu_si512(data + first);
    const std::int32_t left = columns - first;
    if (data == nullptr || left <= 0) return _mm512_setzero_si512();
    if (column_stride == 1) {
      const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1;
      return _mm512_maskz_loadu_epi16(mask, data + first);
    }
    alignas(64) std::uint16_t row[32] = {};
    for (std::int32_t c = 0; c < 32 && c < left; ++c) {
      row[c] = data[(first + c) * column_stride].bits;
    }
    return _mm512_load_si512(row);
  }
};

/// The score scale as a power of two, with its sign, times a positive rest. Q times the power is
/// exact in bf16, so large scores overflow no earlier than they would with a scaled Q.
struct AmxQScale {
  float power = 0, rest = 1;

  explicit AmxQScale(float scale) {
    if (scale == 0) return;
    constexpr std::int32_t kBias = 127, kLargest = 64;  // products stay away from the ends of f32
    const std::uint32_t bits = core::bits_of_float(scale);
    std::int32_t exponent = static_cast<std::int32_t>(bits >> 23 & 0xff) - kBias;
    if (exponent > kLargest) exponent = kLargest;
    if (exponent < -kLargest) exponent = -kLargest;
    power = core::float_of_bits((bits & 0x80000000u) | static_cast<std::uint32_t>(exponent + kBias)
                                                           << 23);
    rest = scale / power;
  }
};

/// Pairs of bf16 times a power of two.
FLASHCORE_HD __m512i multiply_pairs(__m512i pairs, __m512 power) {
  const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512 low = _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll16, pairs, 16));
  const __m512 high = _mm512_castsi512_ps(_mm512_and_si512(pairs, high_half));
  const __m512i low_bits = _mm512_castps_si512(_mm512_mul_ps(low, power));
  const __m512i high_bits = _mm512_castps_si512(_mm512_mul_ps(high, power));
  return _mm512_or_si512(_mm512_maskz_srli_epi32(kAll16, low_bits, 16),
                         _mm512_and_si512(high_bits, high_half));
}

/// Hides a value's origin from the compiler.
FLASHCORE_HD __m512 opaque(__m512 x) {
  __asm__("" : "+v"(x));
  return x;
}

template <int V>
void AmxGemm::pack_q(const WorkTile<float>& work) {
  const AttentionParams& p = work.params;
  const __m512 power = _mm512_set1_ps(AmxQScale(core::score_scale<float>(p)).power);
  const std::int32_t vectors = (work.rows + V * kTileRows - 1) / (V * kTileRows) * V;
  const std::int64_t tiles = dim_tiles(p.head_dim);
  const std::int32_t columns = p.head_dim - (p.fault.is(InjectedFault::head_dim_truncated) ? 1 : 0);
  for (std::int32_t vector = 0; vector < vectors; ++vector) {
    Bf16Row rows[kTileRows];
    for (int r = 0; r < kTileRows; ++r) {
      const std::int32_t row = vector * kTileRows + r;
      rows[r] = {nullptr, p.q_strides.column};
      if (row >= work.rows) continue;
      rows[r].data = static_cast<const Bf16*>(p.q) +
                     core::row_offset(p.q_strides, work.b, work.head_of(row),
                                      work.sequence.q_row + work.query_of(row));
    }
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      char* to = static_cast<char*>(work.q_tile) +
                 ((vector / V * tiles + tile) * V + vector % V) * kTileBytes;
      __m512i m[kTileRows];
      for (int r = 0; r < kTileRows; ++r) {
        m[r] = multiply_pairs(rows[r].load(static_cast<std::int32_t>(tile) * 32, columns), power);
      }
      transpose_16x16(m);
      for (int pair = 0; pair < 16; ++pair) _mm512_store_si512(to + pair * kRowBytes, m[pair]);
    }
  }
}

/// Rows of 32 keys from `first` on; null if not `visible`.
struct Bf16KeyRows {
  Bf16Row row[AmxGemm::kKeyStep];

  Bf16KeyRows(const WorkTile<float>& work, const KeyTensor& t, const core::KvRowMap& kv_row_map,
              std::int32_t first, KeyRange visible) {
    for (Bf16Row& r : row) r = {nullptr, t.strides.column};
    const KeyRange keys = core::intersect(visible, {first, first + AmxGemm::kKeyStep});
    const Bf16* g_head = static_cast<const Bf16*>(t.g_data) + work.kv_head * t.strides.head;
    for_each_key(
        g_head, t.strides, kv_row_map, keys.begin, keys.end - keys.begin,
        [&](std::int32_t, const Bf16* from, std::int32_t key) { row[key - first].data = from; });
    whole = keys.end - keys.begin == AmxGemm::kKeyStep && t.strides.column == 1 &&
            t.columns % core::kBf16TileDim == 0;
  }

  template <bool kWhole>
  FLASHCORE_HD __m512i load(int key, std::int32_t column, std::int32_t columns) const {
    return row[key].load<kWhole>(column, columns);
  }

  bool whole;  // no row and no column is padding
};

/// 32 rows at equal distances.
struct AdjacentRows {
  const Bf16* first;
  std::int64_t stride;

  template <bool>
  FLASHCORE_HD __m512i load(int key, std::int32_t column, std::int32_t) const {
    return _mm512_loadu_si512(first + key * stride + column);
  }
};

/// Copies 32 keys to the tiles at `to`.
template <bool kWhole>
void copy_keys(char* to, const Bf16KeyRows& keys, std::int64_t tiles, std::int32_t columns) {
  for (int key = 0; key < AmxGemm::kKeyStep; ++key) {
    char* to_row = to + key * AmxGemm::kRowBytes;
    for (std::int32_t t = 0; t < tiles; ++t) {
      _mm512_store_si512(to_row + t * 2 * AmxGemm::kTileBytes,
                         keys.row[key].load<kWhole>(t * 32, columns));
    }
  }
}

/// The tiles of K of a KV tile: those that pack_k() wrote, or K itself where its rows are adjacent.
/// Rows of up to 256 bytes: 32 of them have 32 different sets of the L1 cache for each column.
struct AmxKTiles {
  const char* data;
  std::int64_t row, half;    // bytes from a key to the next one, and from the first to the 17th
  std::int64_t step, block;  // bytes to the next 32 columns, and to the next 32 keys

  AmxKTiles(const WorkTile<float>& work, const core::KvRowMap& map, KeyRange tile,
            KeyRange visible) {
    constexpr std::int64_t kMaxRowBytes = 256;
    const AttentionParams& p = work.params;
    const core::Strides& strides = p.k_strides;
    const std::int32_t keys = tile.end - tile.begin;
    in_place = tile.begin >= visible.begin && keys % AmxGemm::kKeyStep == 0 &&
               map.run_from(tile.begin) >= keys && strides.column == 1 &&
               strides.row == p.head_dim && p.head_dim % core::kBf16TileDim == 0 &&
               2 * p.head_dim <= kMaxRowBytes;
    if (in_place) {
      const core::KvLocation at = map.at(tile.begin);
      data = reinterpret_cast<const char*>(static_cast<const Bf16*>(p.k) +
                                           core::row_offset(strides, at, work.kv_head));
      row = 2 * strides.row;
      half = 16 * row, step = AmxGemm::kRowBytes, block = 32 * row;
    } else {
      data = static_cast<const char*>(work.k_tile);
      row = AmxGemm::kRowBytes;
      half = AmxGemm::kTileBytes, step = 2 * half, block = step * AmxGemm::dim_tiles(p.head_dim);
    }
  }

  bool in_place;
};

void AmxGemm::pack_k(const WorkTile<float>& work, const KeyTensor& k,
                     const core::KvRowMap& kv_row_map, KeyRange tile, KeyRange visible) {
  if (AmxKTiles(work, kv_row_map, tile, visible).in_place) return;
  const std::int64_t tiles = dim_tiles(k.columns);
  char* to = static_cast<char*>(work.k_tile);
  for (std::int32_t first = tile.begin; first < tile.end; first += kKeyStep) {
    const Bf16KeyRows keys(work, k, kv_row_map, first, visible);
    keys.whole ? copy_keys<true>(to, keys, tiles, k.columns)
               : copy_keys<false>(to, keys, tiles, k.columns);
    to += 2 * tiles * kTileBytes;
  }
}

/// Transposes 32 keys and 32 columns to two tiles of V^T.
template <bool kWhole, typename Rows>
void transpose_keys(char* to, const Rows& keys, std::int32_t first, std::int32_t columns) {
  for (int half = 0; half < 2; ++half) {
    __m512i m[16];  // [pair of keys][column], pairs interleaved within 128-bit lanes
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      const __m512i even = keys.template load<kWhole>(2 * pair, first, columns);
      const __m512i odd = keys.template load<kWhole>(2 * pair + 1, first, columns);
      m[pair] = half == 0 ? _mm512_unpacklo_epi16(even, odd) : _mm512_unpackhi_epi16(even, odd);
    }
    transpose_16x16(m);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const int column = i / 4 * 8 + half * 4 + i % 4;  // element i % 4 of 128-bit lane i / 4
      _mm512_store_si512(to + column * AmxGemm::kRowBytes, m[i]);
    }
  }
}

void AmxGemm::pack_v(const WorkTile<float>& work, const KeyTensor& v,
                     const core::KvRowMap& kv_row_map, KeyRange tile, KeyRange visible) {
  const std::int64_t blocks = key_blocks(tile.end - tile.begin);
  char* to = static_cast<char*>(work.v_tile);
  for (std::int64_t block = 0; block < blocks; ++block, to += 2 * kTileBytes) {
    const std::int32_t first = tile.begin + static_cast<std::int32_t>(block) * kKeyStep;
    const Bf16KeyRows keys(work, v, kv_row_map, first, visible);
    const AdjacentRows adjacent{keys.row[0].data, v.strides.row};
    const bool is_adjacent = keys.whole && kv_row_map.run_from(first) >= kKeyStep;
    for (std::int32_t column = 0; column < v.columns; column += 32) {
      char* to_tiles = to + column / 32 * blocks * 2 * kTileBytes;
      is_adjacent  ? transpose_keys<true>(to_tiles, adjacent, column, v.columns)
      : keys.whole ? transpose_keys<true>(to_tiles, keys, column, v.columns)
                   : transpose_keys<false>(to_tiles, keys, column, v.columns);
    }
  }
}

// Tiles 0 … 3 accumulate (A index + 2 * B index), 4 and 5 hold A, 6 and 7 hold B.

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
  constexpr std::int64_t kTile = AmxGemm::kTileBytes;
  _tile_loadd(6, b, AmxGemm::kRowBytes);
  _tile_loadd(4, a, a_row);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, a + a_half, a_row);
  _tile_dpbf16ps(1, 5, 6);
  if constexpr (V == 2) {
    _tile_loadd(7, b + kTile, AmxGemm::kRowBytes);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

/// Loads the accumulators from one matrix: 32 rows of V vectors.
template <int V>
FLASHCORE_HD void load_accumulators(const float* from) {
  constexpr std::int64_t kStride = V * AmxGemm::kRowBytes;
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
  constexpr std::int64_t kStride = V * AmxGemm::kRowBytes;
  _tile_stored(0, to, kStride);
  _tile_stored(1, to + 16 * V * 16, kStride);
  if constexpr (V == 2) {
    _tile_stored(2, to + 16, kStride);
    _tile_stored(3, to + 16 * V * 16 + 16, kStride);
  }
}

/// The scores of block `block` of 32 keys: S^T = K Q^T.
template <int V>
FLASHCORE_HD void multiply_qk(float* scores, const AmxKTiles& k, std::int64_t block, const char* q,
                              std::int64_t d_tiles) {
  const char* keys = k.data + block * k.block;
  zero_accumulators<V>();
  for (std::int64_t d = 0; d < d_tiles; ++d) {
    multiply_tiles<V>(keys + d * k.step, k.row, k.half, q + d * V * AmxGemm::kTileBytes);
  }
  store_accumulators<V>(scores);
}

/// Adds V^T P^T of `blocks` blocks of 32 keys to a panel's output. v_stride separates the tiles of
/// 32 columns.
template <int V>
void multiply_pv(float* out, const char* v, std::int64_t v_stride, const char* p,
                 std::int64_t blocks, std::int64_t v_tiles) {
  constexpr std::int64_t kTile = AmxGemm::kTileBytes;
  fence_tile_memory();
  for (std::int64_t column = 0; column < v_tiles; ++column) {
    load_accumulators<V>(out);
    for (std::int64_t i = 0; i < blocks; ++i) {
      multiply_tiles<V>(v + i * 2 * kTile, AmxGemm::kRowBytes, kTile, p + i * V * kTile);
    }
    store_accumulators<V>(out);
    v += v_stride;
    out += 32 * V * AmxGemm::kTileRows;
  }
  fence_tile_memory();
}

/// 2^x for x <= 100, 0 for -inf, NaN for NaN. Relative error below 2e-7: P is rounded to bf16, but
/// its sum is not.
FLASHCORE_HD __m512 exp2_tile(__m512 x) {
  const __m512 f = _mm512_maskz_reduce_ps(kAll16, x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
  __m512 p = _mm512_set1_ps(1.8671300e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.0170307e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5799913e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4016444e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9315130e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(kAll16, p, x);  // p * 2^floor(x)
}

/// A pair of keys' P in bf16, in the halves of each lane; ties round up. NaN may become 0, but the
/// row's sum is then NaN.
FLASHCORE_HD __m512i pack_pair(__m512 even, __m512 odd) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low =
      _mm512_maskz_srli_epi32(kAll16, _mm512_add_epi32(_mm512_castps_si512(even), half), 16);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
  return _mm512_mask_blend_epi16(0xaaaaaaaau, low, high);
}

/// The row statistics of a panel while its KV tile is processed.
template <int V>
struct AmxRowStats {
  static constexpr int kRows = AmxGemm::kTileRows;

  Vec<float> max[V], base[V];
  Vec<float> sum[V], tile_sum[V];  // of the tiles before and of this one

  AmxRowStats(const WorkTile<float>& work, std::int32_t row) {
    for (int v = 0; v < V; ++v) {
      max[v] = load(work.max + row + v * kRows);
      sum[v] = load(work.sum + row + v * kRows);
      tile_sum[v] = splat(0.f);
      set_base(v);
    }
  }
  void save(const WorkTile<float>& work, std::int32_t row) const {
    for (int v = 0; v < V; ++v) {
      store(work.max + row + v * kRows, max[v]);
      store(work.sum + row + v * kRows, sum[v] + tile_sum[v]);
    }
  }
  /// core::softmax_base() of every lane. max is never NaN, so below `lowest` there is only -inf.
  FLASHCORE_HD void set_base(int v) {
    base[v] = select_less(max[v], splat(-__FLT_MAX__), splat(0.f), max[v]);
  }

  /// Lets the maxima grow to those of new scores, which still lack the factor `scale` > 0. Returns
  /// true if one has grown; `rescale` are then the factors of the rows' sums and outputs.
  FLASHCORE_HD bool grow(const float* scores, std::int32_t keys, float scale, core::Fault fault,
                         Vec<float> (&rescale)[V]) {
    Vec<float> even[V], odd[V];
    for (int v = 0; v < V; ++v) even[v] = odd[v] = splat(core::negative_infinity<float>());
    std::int32_t key = 0;
    for (; key + 2 <= keys; key += 2) {
      for (int v = 0; v < V; ++v) {
        even[v] = max_ignore_nan<float>(even[v], load(scores + (key * V + v) * kRows));
        odd[v] = max_ignore_nan<float>(odd[v], load(scores + ((key + 1) * V + v) * kRows));
      }
    }
    __mmask16 grown[V], any = 0;
    for (int v = 0; v < V; ++v) {
      if (key < keys)
        even[v] = max_ignore_nan<float>(even[v], load(scores + (key * V + v) * kRows));
      even[v] = max_ignore_nan<float>(even[v], odd[v]) * splat(scale);
      grown[v] = _mm512_cmp_ps_mask((__m512)max[v], (__m512)even[v], _CMP_LT_OQ);
      any |= grown[v];
    }
    if (any == 0) return false;
    for (int v = 0; v < V; ++v) {
      const Vec<float> old = max[v];
      max[v] = (Vec<float>)_mm512_mask_mov_ps((__m512)old, grown[v], (__m512)even[v]);
      set_base(v);
      rescale[v] = exp<float>(old - base[v]);
      if (fault.is(InjectedFault::rescale_forgotten)) rescale[v] = splat(1.f);
      sum[v] = sum[v] * rescale[v];
      tile_sum[v] = tile_sum[v] * rescale[v];
    }
    return true;
  }

  /// P of up to 32 keys as V tiles, 0 behind them. The sums add P before it is rounded.
  FLASHCORE_HD void exponentiate(char* p, const float* scores, std::int32_t keys, float scale) {
    const __m512 factor = _mm512_set1_ps(scale);
    const __m512 log2_e = _mm512_set1_ps(static_cast<float>(core::kLog2E));
    // The product is rounded, as in calls whose score options follow it. opaque() keeps the
    // compiler from fusing it with the subtraction.
    const auto weight = [&](std::int32_t key, int v) {
      const __m512 score = _mm512_load_ps(scores + (key * V + v) * kRows);
      const __m512 scaled = opaque(_mm512_mul_ps(score, factor));
      return exp2_tile(_mm512_mul_ps(_mm512_sub_ps(scaled, (__m512)base[v]), log2_e));
    };
    const auto to = [&](std::int32_t pair, int v) {
      return p + v * AmxGemm::kTileBytes + pair * AmxGemm::kRowBytes;
    };
    Vec<float> step_sum[V];
    for (int v = 0; v < V; ++v) step_sum[v] = splat(0.f);
    std::int32_t pair = 0;
    for (; 2 * pair + 2 <= keys; ++pair) {
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        const __m512 even = weight(2 * pair, v), odd = weight(2 * pair + 1, v);
        step_sum[v] = step_sum[v] + (Vec<float>)even + (Vec<float>)odd;
        _mm512_store_si512(to(pair, v), pack_pair(even, odd));
      }
    }
    for (int v = 0; v < V; ++v) {
      std::int32_t rest = pair;
      if (2 * rest < keys) {
        const __m512 even = weight(keys - 1, v);
        step_sum[v] = step_sum[v] + (Vec<float>)even;
        _mm512_store_si512(to(rest++, v), pack_pair(even, _mm512_setzero_ps()));
      }
      for (; rest < 16; ++rest) _mm512_store_si512(to(rest, v), _mm512_setzero_si512());
      tile_sum[v] = tile_sum[v] + step_sum[v];
    }
  }
};

/// Multiplies a panel's output by the factors of its rows.
template <int V>
void rescale_output(float* out, std::int64_t v_dim, const Vec<float> (&rescale)[V]) {
  for (std::int64_t i = 0; i < v_dim; ++i, out += V * kLanes<float>) {
    for (int v = 0; v < V; ++v) {
      store(out + v * kLanes<float>, load(out + v * kLanes<float>) * rescale[v]);
    }
  }
}

/// A panel of a KV tile: S^T, softmax, O^T. O stays in the format of the accumulators and is only
/// passed over if a row's maximum has grown.
template <int V>
void process_panel(const WorkTile<float>& work, const AmxKTiles& k, std::int32_t row, KeyRange tile,
                   std::int32_t keys, KeyRange fully_visible, const AmxQScale& q_scale) {
  constexpr std::int32_t kStep = AmxGemm::kKeyStep;
  constexpr std::int64_t kTile = AmxGemm::kTileBytes, kPanelRows = V * AmxGemm::kTileRows;
  const AttentionParams& p = work.params;
  const std::int64_t d_tiles = AmxGemm::dim_tiles(p.head_dim),
                     v_tiles = AmxGemm::dim_tiles(p.v_dim);
  const std::int64_t blocks = AmxGemm::key_blocks(keys);
  const char* q = static_cast<const char*>(work.q_tile) + row * d_tiles * AmxGemm::kRowBytes;
  char* weights = static_cast<char*>(work.p_tile);
  float* out = work.out_tile + row * v_tiles * 32;
  fence_tile_memory();
  for (std::int64_t block = 0; block < blocks; ++block) {
    multiply_qk<V>(work.scores + block * kStep * kPanelRows, k, block, q, d_tiles);
  }
  fence_tile_memory();
  const float scale = apply_score_scale<V>(work, work.scores, keys, q_scale.rest);
  apply_mods_and_mask<V>(work, work.scores, row, {tile.begin, tile.begin + keys}, fully_visible);
  AmxRowStats<V> stats(work, row);
  Vec<float> rescale[V];
  if (stats.grow(work.scores, keys, scale, p.fault, rescale)) {
    rescale_output<V>(out, v_tiles * 32, rescale);
  }
  for (std::int32_t block = 0; block < blocks; ++block) {
    const std::int32_t left = keys - block * kStep;
    stats.exponentiate(weights + block * V * kTile, work.scores + block * kStep * kPanelRows,
                       left < kStep ? left : kStep, scale);
  }
  stats.save(work, row);
  multiply_pv<V>(out, static_cast<const char*>(work.v_tile),
                 AmxGemm::key_blocks(tile.end - tile.begin) * 2 * kTile, weights, blocks, v_tiles);
}

template <int V>
void AmxGemm::process_panels(const WorkTile<float>& work, std::int32_t panels, KeyRange tile) {
  const AmxQScale q_scale(core::score_scale<float>(work.params));
  const AmxKTiles k(work, core::kv_row_map(work.params, work.sequence, work.b), tile,
                    visible_to_tile(work));
  for (std::int32_t panel = 0; panel < panels; ++panel) {
    const std::int32_t row = panel * V * kTileRows;
    const std::int32_t last =
        (row + V * kTileRows < work.rows ? row + V * kTileRows : work.rows) - 1;
    const std::int32_t first_query = work.query_of(row), last_query = work.query_of(last);
    const KeyRange visible =
        core::intersect(tile, core::keys_seen_by_any(work.sequence.mask, first_query, last_query));
    if (visible.empty()) continue;
    process_panel<V>(work, k, row, tile, visible.end - tile.begin,
                     core::keys_seen_by_all(work.sequence.mask, first_query, last_query), q_scale);
  }
}

}  // namespace
}  // namespace flashcore::cpu
