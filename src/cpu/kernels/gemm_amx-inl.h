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

// Full masks: GCC 12 warns of uninitialised values in the intrinsics without a mask.
inline constexpr __mmask8 kAll8 = 0xff;
inline constexpr __mmask16 kAll16 = 0xffff;

/// Transposes a matrix of 32-bit elements, 16 x 16.
FLASHCORE_HD void transpose_16x16(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_maskz_unpacklo_epi32(kAll16, r[i], r[i + 1]);
    t[i + 1] = _mm512_maskz_unpackhi_epi32(kAll16, r[i], r[i + 1]);
  }
  // r[4 i + c]: in each 128-bit lane L, column 4 L + c of rows 4 i … 4 i + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_maskz_unpacklo_epi64(kAll8, t[i], t[i + 2]);
    r[i + 1] = _mm512_maskz_unpackhi_epi64(kAll8, t[i], t[i + 2]);
    r[i + 2] = _mm512_maskz_unpacklo_epi64(kAll8, t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_maskz_unpackhi_epi64(kAll8, t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i even_01 = _mm512_maskz_shuffle_i32x4(kAll16, r[c], r[4 + c], 0x88);
    const __m512i odd_01 = _mm512_maskz_shuffle_i32x4(kAll16, r[c], r[4 + c], 0xdd);
    const __m512i even_23 = _mm512_maskz_shuffle_i32x4(kAll16, r[8 + c], r[12 + c], 0x88);
    const __m512i odd_23 = _mm512_maskz_shuffle_i32x4(kAll16, r[8 + c], r[12 + c], 0xdd);
    r[c] = _mm512_maskz_shuffle_i32x4(kAll16, even_01, even_23, 0x88);
    r[4 + c] = _mm512_maskz_shuffle_i32x4(kAll16, odd_01, odd_23, 0x88);
    r[8 + c] = _mm512_maskz_shuffle_i32x4(kAll16, even_01, even_23, 0xdd);
    r[12 + c] = _mm512_maskz_shuffle_i32x4(kAll16, odd_01, odd_23, 0xdd);
  }
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

  bool whole;  // no row and no column is padding
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

void AmxGemm::pack_k(const WorkTile<float>& work, const KeyTensor& k,
                     const core::KvRowMap& kv_row_map, KeyRange tile, KeyRange visible) {
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
template <bool kWhole>
void transpose_keys(char* to, const Bf16KeyRows& keys, std::int32_t first, std::int32_t columns) {
  for (int half = 0; half < 2; ++half) {
    __m512i m[16];  // [pair of keys][column], pairs interleaved within 128-bit lanes
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      const __m512i even = keys.row[2 * pair].load<kWhole>(first, columns);
      const __m512i odd = keys.row[2 * pair + 1].load<kWhole>(first, columns);
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
    const Bf16KeyRows keys(work, v, kv_row_map,
                           tile.begin + static_cast<std::int32_t>(block) * kKeyStep, visible);
    for (std::int32_t column = 0; column < v.columns; column += 32) {
      char* to_tiles = to + column / 32 * blocks * 2 * kTileBytes;
      keys.whole ? transpose_keys<true>(to_tiles, keys, column, v.columns)
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

/// Multiplies the 2 tiles at `a` by the V tiles at `b`.
template <int V>
FLASHCORE_HD void multiply_tiles(const char* a, const char* b) {
  constexpr std::int64_t kTile = AmxGemm::kTileBytes;
  _tile_loadd(6, b, AmxGemm::kRowBytes);
  _tile_loadd(4, a, AmxGemm::kRowBytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, a + kTile, AmxGemm::kRowBytes);
  _tile_dpbf16ps(1, 5, 6);
  if constexpr (V == 2) {
    _tile_loadd(7, b + kTile, AmxGemm::kRowBytes);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
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

/// A panel's scores, P and softmax. Two panels are in flight, so scores and P have two buffers.
template <int V>
struct AmxPanel {
  static constexpr std::int32_t kRows = V * AmxGemm::kTileRows;

  std::int32_t index;
  std::int32_t keys;  // of the tile; behind them there is none that a row of the panel sees
  float* scores;      // [keys][V vectors]
  char* p;            // [keys / 32][V] tiles
  PanelSoftmax<V, float> softmax;

  /// The first panel from `index` on whose rows see a key of the tile. keys is 0 if there is none.
  AmxPanel(const WorkTile<float>& work, std::int32_t first, std::int32_t panels, KeyRange tile,
           std::int64_t buffer)
      : index(first), keys(0) {
    for (; index < panels; ++index) {
      const std::int32_t row = index * kRows;
      const std::int32_t last = (row + kRows < work.rows ? row + kRows : work.rows) - 1;
      const KeyRange visible = core::intersect(
          tile,
          core::keys_seen_by_any(work.sequence.mask, work.query_of(row), work.query_of(last)));
      if (visible.empty()) continue;
      keys = visible.end - tile.begin;
      break;
    }
    scores = work.scores + buffer * work.params.tile_k * kRows;
    p = static_cast<char*>(work.p_tile) + buffer * work.params.tile_k * kRows * 2;
  }
};

/// The matrix instructions of a step of the loop over panels, one call at a time, so that the exp2
/// of another panel can run between them: O^T of panel `pv`, then S^T of panel `qk`.
template <int V>
class AmxStream {
 public:
  /// `tile_keys` is the number of packed keys. Panels without keys are left out.
  AmxStream(const WorkTile<float>& work, std::int32_t tile_keys, const AmxPanel<V>* qk,
            const AmxPanel<V>* pv)
      : d_tiles_(AmxGemm::dim_tiles(work.params.head_dim)) {
    if (pv != nullptr && pv->keys > 0) {
      const std::int64_t v_tiles = AmxGemm::dim_tiles(work.params.v_dim);
      blocks_ = AmxGemm::key_blocks(pv->keys);
      v_stride_ = AmxGemm::key_blocks(tile_keys) * 2 * kTile;
      pv_left_ = v_tiles * blocks_;
      v_ = static_cast<const char*>(work.v_tile);
      p_ = pv->p;
      rescale_ = pv->softmax.rescale;
      out_ = work.out_tile + pv->index * V * AmxGemm::kTileRows * v_tiles * 32;
    }
    if (qk != nullptr && qk->keys > 0) {
      qk_left_ = d_tiles_ * AmxGemm::key_blocks(qk->keys);
      k_ = static_cast<const char*>(work.k_tile);
      q_ = static_cast<const char*>(work.q_tile) + qk->index * V * d_tiles_ * AmxGemm::kTileBytes;
      scores_ = qk->scores;
    }
    fence_tile_memory();
    zero_accumulators<V>();
  }

  std::int64_t left() const { return pv_left_ + qk_left_; }

  /// Multiplies 2 A tiles by V B tiles.
  FLASHCORE_HD void step() {
    if (pv_left_ > 0) {
      step_pv();
    } else {
      step_qk();
    }
  }
  void finish() {
    while (left() > 0) step();
    fence_tile_memory();
  }

 private:
  static constexpr std::int64_t kTile = AmxGemm::kTileBytes;

  FLASHCORE_HD void step_pv() {
    multiply_tiles<V>(v_ + at_ * 2 * kTile, p_ + at_ * V * kTile);
    --pv_left_;
    if (++at_ < blocks_) return;
    at_ = 0;
    v_ += v_stride_;
    update_output();
    zero_accumulators<V>();
  }
  FLASHCORE_HD void step_qk() {
    multiply_tiles<V>(k_ + at_ * 2 * kTile, q_ + at_ * V * kTile);
    --qk_left_;
    if (++at_ < d_tiles_) return;
    at_ = 0;
    k_ += 2 * d_tiles_ * kTile;
    store_accumulators<V>(scores_);
    scores_ += AmxGemm::kKeyStep * V * AmxGemm::kTileRows;
    zero_accumulators<V>();
  }
  /// out = out * rescale + accumulators, 32 columns.
  void update_output() {
    alignas(64) float product[32 * V * AmxGemm::kTileRows];
    store_accumulators<V>(product);
    fence_tile_memory();
    for (int i = 0; i < 32 * V; ++i, out_ += AmxGemm::kTileRows) {
      store(out_, load(out_) * rescale_[i % V] + load(product + i * AmxGemm::kTileRows));
    }
  }

  std::int64_t d_tiles_, blocks_ = 0, v_stride_ = 0;
  std::int64_t pv_left_ = 0, qk_left_ = 0, at_ = 0;  // at_: in the current accumulation
  const char* v_ = nullptr;
  const char* p_ = nullptr;
  const Vec<float>* rescale_ = nullptr;
  float* out_ = nullptr;
  const char* k_ = nullptr;
  const char* q_ = nullptr;
  float* scores_ = nullptr;
};

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

/// P of a panel as tiles, and the sums of P before it is rounded. Runs `stream` in between.
template <int V>
void pack_weights(const AmxPanel<V>& panel, float* sum, float scale, AmxStream<V>& stream) {
  constexpr int kRows = AmxGemm::kTileRows;
  const std::int32_t keys = panel.keys;
  const std::int64_t tile_rows = AmxGemm::key_blocks(keys) * 16;  // pairs of keys with padding
  const __m512 factor = _mm512_set1_ps(scale);
  const __m512 log2_e = _mm512_set1_ps(static_cast<float>(core::kLog2E));
  __m512 tile_sum[V];
  for (int v = 0; v < V; ++v) tile_sum[v] = _mm512_setzero_ps();
  // The product is rounded, as in calls whose score options follow it. opaque() keeps the compiler
  // from fusing it with the subtraction.
  const auto weight = [&](std::int64_t key, int v) {
    const __m512 score = _mm512_load_ps(panel.scores + (key * V + v) * kRows);
    const __m512 scaled = opaque(_mm512_mul_ps(score, factor));
    const __m512 x = _mm512_mul_ps(_mm512_sub_ps(scaled, (__m512)panel.softmax.base[v]), log2_e);
    return exp2_tile(x);
  };
  const auto to = [&](std::int64_t pair, int v) {
    return panel.p + (pair / 16 * V + v) * AmxGemm::kTileBytes + pair % 16 * AmxGemm::kRowBytes;
  };
  const std::int64_t pairs = keys / 2, steps = stream.left();
  std::int64_t credit = 0;
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    for (int v = 0; v < V; ++v) {
      const __m512 even = weight(2 * pair, v), odd = weight(2 * pair + 1, v);
      tile_sum[v] = _mm512_add_ps(_mm512_add_ps(tile_sum[v], even), odd);
      _mm512_store_si512(to(pair, v), pack_pair(even, odd));
    }
    for (credit += steps; credit >= pairs; credit -= pairs) stream.step();
  }
  for (int v = 0; v < V; ++v) {
    std::int64_t pair = pairs;
    if (keys % 2 != 0) {
      const __m512 even = weight(keys - 1, v);
      tile_sum[v] = _mm512_add_ps(tile_sum[v], even);
      _mm512_store_si512(to(pair++, v), pack_pair(even, _mm512_setzero_ps()));
    }
    for (; pair < tile_rows; ++pair) _mm512_store_si512(to(pair, v), _mm512_setzero_si512());
    add_to_sum(sum + v * kRows, panel.softmax.rescale[v], (Vec<float>)tile_sum[v]);
  }
  stream.finish();
}

/// While the vector units compute P of a panel, the matrix unit computes O^T of the panel before
/// and S^T of the panel behind.
template <int V>
void AmxGemm::process_panels(const WorkTile<float>& work, std::int32_t panels, KeyRange tile) {
  const AttentionParams& p = work.params;
  const std::int32_t tile_keys = tile.end - tile.begin;
  const AmxQScale q_scale(core::score_scale<float>(p));
  AmxPanel<V> current(work, 0, panels, tile, 0);
  AmxPanel<V> previous = current;
  previous.keys = 0;
  AmxStream<V>(work, tile_keys, &current, nullptr).finish();
  for (std::int64_t buffer = 1; current.keys > 0; buffer ^= 1) {
    const std::int32_t row = current.index * V * kTileRows, keys = current.keys;
    const float scale = apply_score_scale<V>(work, current.scores, keys, q_scale.rest);
    apply_mods_and_mask<V>(work, current.scores, row, {tile.begin, tile.begin + keys});
    current.softmax = update_max<V>(current.scores, keys, scale, work.max + row, p.fault);
    const AmxPanel<V> next(work, current.index + 1, panels, tile, buffer);
    AmxStream<V> stream(work, tile_keys, &next, &previous);
    pack_weights<V>(current, work.sum + row, scale, stream);
    previous = current;
    current = next;
  }
  AmxStream<V>(work, tile_keys, nullptr, &previous).finish();
}

}  // namespace
}  // namespace flashcore::cpu
