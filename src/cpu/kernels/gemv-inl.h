// The GEMMs of few rows, such as decode: dot products along the columns of K and V, whose rows are
// read where they are. The time is that of reading K and V.
//
//   S[row][key] = K[key] · Q[row]     lanes are columns; sums of 16 lanes are reduced together
//   P[row][key] = exp(S - max[row])   lanes are keys: a vector of rows would be mostly empty
//   O[row] = O[row] * rescale[row] + Σ_key P[row][key] V[key]     lanes are columns
//
// A tile has up to 16 rows; Q, S, P and O are row-major. Score options and masks work on vectors of
// rows (score-inl.h): scores are transposed for them. 8-bit values are widened in registers; their
// scales multiply scores and P. Rows whose columns are not adjacent are first copied to the scratch
// memory. Each element of S and O is computed by the same sequence of operations whatever the
// number of rows.
#pragma once

#include <immintrin.h>

#include "cpu/kernels/fwd-inl.h"

namespace flashcore::cpu {
namespace {

inline constexpr int kRowLanes = kLanes<float>;
static_assert(kRowLanes == core::kGemvRows);
inline constexpr std::int32_t kMaxRowsTileK =
    96;  // the largest tile_k of AVX-512 (plan/model/cpu.cc)

/// 8-bit values as stored.
template <core::Element kElement>
struct Code {
  std::uint8_t bits;
};

template <typename Storage>
inline constexpr bool kHasScales = false;
template <core::Element kElement>
inline constexpr bool kHasScales<Code<kElement>> = true;

template <typename Compute, core::Element kElement>
FLASHCORE_HD Compute widen(Code<kElement> x) {
  return values_of(kElement)[x.bits];
}

/// core::decode() of 16 values.
template <core::Element kElement>
FLASHCORE_HD Vec<float> load_widened(const Code<kElement>* from) {
  const __m128i codes = _mm_loadu_si128((const __m128i*)from);
  if constexpr (kElement == core::Element::int8 || kElement == core::Element::u8) {
    const bool flips = kElement == core::Element::u8;  // the top bit
    const __m128i bits = flips ? _mm_xor_si128(codes, _mm_set1_epi8(-128)) : codes;
    return (Vec<float>)_mm512_maskz_cvtepi32_ps(kAll16, _mm512_maskz_cvtepi8_epi32(kAll16, bits));
  } else if constexpr (kElement == core::Element::e5m2) {  // the high half of f16
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
    return (Vec<float>)_mm512_maskz_cvtph_ps(kAll16, halves);
  } else {
    // f16 with the same exponent and mantissa bits is 2^-8 times the value.
    // Sign-extended and shifted, the sign is in place and also in the highest bit of the exponent.
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    const __m256i largest = _mm256_set1_epi16(0x3f80);
    const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(shifted, largest), largest);
    __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16(-0x4001));
    halves = _mm256_mask_mov_epi16(halves, is_nan, _mm256_set1_epi16(0x7e00));
    return (Vec<float>)_mm512_maskz_cvtph_ps(kAll16, halves) * splat(256.f);
  }
}

/// Columns [0, count) of a row, count < 16, widened; 0 behind them.
template <typename Storage>
FLASHCORE_HD Vec<float> load_tail(const Storage* from, std::int32_t count) {
  alignas(64) float lanes[kRowLanes] = {};
  for (std::int32_t i = 0; i < count; ++i) lanes[i] = widen<float>(from[i]);
  return load(lanes);
}

FLASHCORE_HD __m512 add_halves(__m512 low, __m512 high) { return _mm512_add_ps(low, high); }

/// The sums of the lanes of 16 vectors. Lane 4 (i % 4) + i / 4 has the sum of vector i.
FLASHCORE_HD Vec<float> reduce_16(const Vec<float> (&acc)[16]) {
  __m512 m[16];
  // 256-bit halves, 128-bit quarters, pairs, elements: each vector's lanes are added in one order.
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512 a = (__m512)acc[2 * i], b = (__m512)acc[2 * i + 1];
    m[i] = add_halves(_mm512_maskz_shuffle_f32x4(0xffff, a, b, 0x44),
                      _mm512_maskz_shuffle_f32x4(0xffff, a, b, 0xee));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    m[i] = add_halves(_mm512_maskz_shuffle_f32x4(0xffff, m[2 * i], m[2 * i + 1], 0x88),
                      _mm512_maskz_shuffle_f32x4(0xffff, m[2 * i], m[2 * i + 1], 0xdd));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    m[i] = add_halves(_mm512_shuffle_ps(m[2 * i], m[2 * i + 1], 0x44),
                      _mm512_shuffle_ps(m[2 * i], m[2 * i + 1], 0xee));
  }
  return (Vec<float>)add_halves(_mm512_shuffle_ps(m[0], m[1], 0x88),
                                _mm512_shuffle_ps(m[0], m[1], 0xdd));
}

/// All 16 lanes combined, in halves: op(lane i, lane i ± 8), then ± 4, 2 and 1.
template <typename Op>
FLASHCORE_HD float combine_lanes(Vec<float> lanes, Op op) {
  const auto step = [&](__m512 other) { lanes = op(lanes, (Vec<float>)other); };
  step(_mm512_maskz_shuffle_f32x4(kAll16, (__m512)lanes, (__m512)lanes, 0x4e));
  step(_mm512_maskz_shuffle_f32x4(kAll16, (__m512)lanes, (__m512)lanes, 0xb1));
  step(_mm512_shuffle_ps((__m512)lanes, (__m512)lanes, 0x4e));
  step(_mm512_shuffle_ps((__m512)lanes, (__m512)lanes, 0xb1));
  return lanes[0];
}

/// The rows of K or V of a KV tile.
template <typename Storage>
struct TileRows {
  const Storage* row[kMaxRowsTileK];
  float scale[kMaxRowsTileK];  // of 8-bit rows

  /// The rows in memory. Their columns are adjacent.
  void find(const WorkTile<float>& work, const KeyTensor& t, const core::KvRowMap& map,
            KeyRange tile) {
    const Storage* g_head = static_cast<const Storage*>(t.g_data) + work.kv_head * t.strides.head;
    const std::int64_t row_stride = t.strides.row;
    for (std::int32_t key = tile.begin, end = key; key < tile.end; key = end) {
      const std::int32_t run = map.run_from(key), left = tile.end - key;
      const std::int32_t count = run < left ? run : left;
      const core::KvLocation at = map.at(key);
      const Storage* from = g_head + at.block * t.strides.batch + at.row * row_stride;
      const Storage** to = row + (key - tile.begin);
      for (std::int32_t i = 0; i < count; ++i) to[i] = from + i * row_stride;
      end = key + count;
    }
    if constexpr (kHasScales<Storage>) find_scales(work, t, tile);
  }
  /// The rows of a copy.
  void find(const Storage* copy, std::int32_t columns, KeyRange tile) {
    for (std::int32_t r = 0; r < tile.end - tile.begin; ++r) row[r] = copy + r * columns;
  }

 private:
  /// A scale is looked up once for the keys that share it: that takes a division.
  void find_scales(const WorkTile<float>& work, const KeyTensor& t, KeyRange tile) {
    const std::int64_t block = t.scales.block_rows;
    for (std::int32_t key = tile.begin, end = key; key < tile.end; key = end) {
      const float shared =
          core::row_scale(work.params, t.element, t.scales, work.b, work.kv_head, key);
      const std::int64_t block_end = t.scales.is_per_block() ? (key / block + 1) * block : tile.end;
      end = block_end < tile.end ? static_cast<std::int32_t>(block_end) : tile.end;
      for (std::int32_t i = key; i < end; ++i) scale[i - tile.begin] = shared;
    }
  }
};

/// Fetches a row to the L1 cache.
FLASHCORE_HD void prefetch_row(const void* row, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += 64) {
    __builtin_prefetch(static_cast<const char*>(row) + at, 0, 3);
  }
}

/// Scores of R rows of Q and up to 16 / R keys: scores[row * pitch + key].
template <int R, typename Storage>
void score_block(float* scores, std::int32_t pitch, const float* q, std::int32_t head_dim,
                 const Storage* const* k, std::int32_t keys) {
  constexpr int kKeys = 16 / R;
  const Storage* row[kKeys];
  for (int i = 0; i < kKeys; ++i) row[i] = k[i < keys ? i : keys - 1];
  Vec<float> acc[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) acc[i] = splat(0.f);
  std::int32_t d = 0;
  for (; d + kRowLanes <= head_dim; d += kRowLanes) {
    Vec<float> query[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) query[r] = load(q + r * head_dim + d);
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) {
      const Vec<float> key = load_widened(row[i] + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[i * R + r] = mul_add(key, query[r], acc[i * R + r]);
    }
  }
  if (d < head_dim) {
    for (int i = 0; i < kKeys; ++i) {
      const Vec<float> key = load_tail(row[i] + d, head_dim - d);
      for (int r = 0; r < R; ++r) {
        acc[i * R + r] =
            mul_add(key, load_tail(q + r * head_dim + d, head_dim - d), acc[i * R + r]);
      }
    }
  }
  alignas(64) float sums[16];
  store(sums, reduce_16(acc));
  for (std::int32_t i = 0; i < keys; ++i) {
    for (int r = 0; r < R; ++r) {
      const int at = i * R + r;
      scores[r * pitch + i] = sums[at % 4 * 4 + at / 4];
    }
  }
}

/// Rows that are fetched while others are multiplied.
template <typename Storage>
struct NextRows {
  const Storage* const* row;
  std::int32_t count;
  std::int64_t bytes;

  FLASHCORE_HD void fetch(std::int32_t i) const {
    if (i < count) prefetch_row(row[i], bytes);
  }
};

/// C vectors of columns of the output of R rows.
template <int R, int C, typename Storage>
FLASHCORE_HD void output_block(float* out, std::int32_t v_dim, const float* p, std::int32_t pitch,
                               const Storage* const* v, std::int32_t column, std::int32_t keys,
                               const float* rescale, const NextRows<Storage>& next) {
  Vec<float> acc[R][C];
#pragma GCC unroll 8
  for (int i = 0; i < R * C; ++i) acc[i / C][i % C] = splat(0.f);
  for (std::int32_t key = 0; key < keys; ++key) {
    next.fetch(key);
    Vec<float> value[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) value[c] = load_widened(v[key] + column + c * kRowLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec<float> weight = splat(p[r * pitch + key]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = mul_add(weight, value[c], acc[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      float* to = out + r * v_dim + column + c * kRowLanes;
      store(to, mul_add(load(to), splat(rescale[r]), acc[r][c]));
    }
  }
}

/// The output of R rows, whose weights are p[row * pitch + key].
template <int R, typename Storage>
void output_rows(float* out, std::int32_t v_dim, const float* p, std::int32_t pitch,
                 const Storage* const* v, std::int32_t keys, const float* rescale,
                 NextRows<Storage> next) {
  constexpr int kVectors = R == 1 ? 8 : 4;
  std::int32_t column = 0;
  for (; column + kVectors * kRowLanes <= v_dim; column += kVectors * kRowLanes) {
    output_block<R, kVectors>(out, v_dim, p, pitch, v, column, keys, rescale, next);
    next.count = 0;
  }
  for (; column + kRowLanes <= v_dim; column += kRowLanes) {
    output_block<R, 1>(out, v_dim, p, pitch, v, column, keys, rescale, next);
    next.count = 0;
  }
  if (column == v_dim) return;
  const std::int32_t left = v_dim - column;
  for (int r = 0; r < R; ++r) {
    Vec<float> acc = splat(0.f);
    for (std::int32_t key = 0; key < keys; ++key) {
      acc = mul_add(splat(p[r * pitch + key]), load_tail(v[key] + column, left), acc);
    }
    float* to = out + r * v_dim + column;
    alignas(64) float lanes[kRowLanes];
    store(lanes, mul_add(load_tail(to, left), splat(rescale[r]), acc));
    for (std::int32_t i = 0; i < left; ++i) to[i] = lanes[i];
  }
}

/// Calls use<R>(first row) for blocks of 4, 2 and 1 rows.
template <typename Use>
FLASHCORE_HD void for_row_blocks(std::int32_t rows, Use use) {
  std::int32_t row = 0;
  for (; row + 4 <= rows; row += 4) use.template operator()<4>(row);
  for (; row + 2 <= rows; row += 2) use.template operator()<2>(row);
  for (; row < rows; ++row) use.template operator()<1>(row);
}

/// Calls use(first, mask) for vectors of keys; mask has the lanes below `keys`.
template <typename Use>
FLASHCORE_HD void for_key_vectors(std::int32_t keys, Use use) {
  for (std::int32_t key = 0; key < keys; key += kRowLanes) {
    const std::int32_t left = keys - key;
    use(key, left >= kRowLanes ? kAll16 : static_cast<__mmask16>((1u << left) - 1u));
  }
}

/// Scores options and masks of a tile, by the code of the other kernels: a vector of rows per key.
void modify_rows(const WorkTile<float>& work, std::int32_t pitch, KeyRange tile) {
  const KeyRange seen_by_all =
      core::keys_seen_by_all(work.sequence.mask, work.query_of(0), work.query_of(work.rows - 1));
  const bool is_masked = tile.begin < seen_by_all.begin || tile.end > seen_by_all.end;
  if (work.params.fast_path && !is_masked) return;
  const std::int32_t keys = tile.end - tile.begin;
  alignas(64) float by_key[kMaxRowsTileK * kRowLanes];
  __m512i block[kRowLanes];
  for_key_vectors(keys, [&](std::int32_t key, __mmask16 mask) {
    for (int r = 0; r < kRowLanes; ++r) {
      block[r] = r < work.rows ? _mm512_maskz_loadu_epi32(mask, work.scores + r * pitch + key)
                               : _mm512_setzero_si512();
    }
    transpose_16x16(block);
    for (int i = 0; i < kRowLanes; ++i) {
      _mm512_store_si512(by_key + (key + i) * kRowLanes, block[i]);
    }
  });
  apply_mods_and_mask<1>(work, by_key, 0, tile, seen_by_all);
  for_key_vectors(keys, [&](std::int32_t key, __mmask16 mask) {
    for (int i = 0; i < kRowLanes; ++i) {
      block[i] = _mm512_load_si512(by_key + (key + i) * kRowLanes);
    }
    transpose_16x16(block);
    for (int r = 0; r < work.rows; ++r) {
      _mm512_mask_storeu_epi32(work.scores + r * pitch + key, mask, block[r]);
    }
  });
}

/// Scores of a vector of keys; -inf in the other lanes.
FLASHCORE_HD Vec<float> load_scores(const float* scores, __mmask16 mask) {
  const Vec<float> hidden = splat(core::negative_infinity<float>());
  return (Vec<float>)_mm512_mask_loadu_ps((__m512)hidden, mask, scores);
}

/// The largest scores of rows in a KV tile, one row per lane. NaN is ignored.
void find_row_maxima(const WorkTile<float>& work, std::int32_t pitch, std::int32_t keys,
                     float (&largest)[kRowLanes]) {
  for (std::int32_t row = 0; row < kRowLanes; ++row) {
    Vec<float> lanes = splat(core::negative_infinity<float>());
    if (row < work.rows) {
      for_key_vectors(keys, [&](std::int32_t key, __mmask16 mask) {
        const float* s = work.scores + row * pitch + key;
        lanes = max_ignore_nan<float>(lanes, load_scores(s, mask));
      });
    }
    largest[row] = combine_lanes(
        lanes, [](Vec<float> a, Vec<float> b) { return max_ignore_nan<float>(a, b); });
  }
}

/// P = exp(S - base) in place, then multiplied by the scales of V, and the sums of P.
template <typename Storage>
void exponentiate_rows(const WorkTile<float>& work, std::int32_t pitch, const TileRows<Storage>& v,
                       std::int32_t keys, const PanelSoftmax<1, float>& softmax) {
  alignas(64) float base[kRowLanes], sums[kRowLanes] = {};
  store(base, softmax.base[0]);
  for (std::int32_t row = 0; row < work.rows; ++row) {
    Vec<float> sum = splat(0.f);
    for_key_vectors(keys, [&](std::int32_t key, __mmask16 mask) {
      float* s = work.scores + row * pitch + key;
      Vec<float> p = exp<float>(load_scores(s, mask) - splat(base[row]));
      sum = sum + p;
      if constexpr (kHasScales<Storage>) p = p * load(v.scale + key);
      _mm512_mask_storeu_ps(s, mask, (__m512)p);
    });
    sums[row] = combine_lanes(sum, [](Vec<float> a, Vec<float> b) { return a + b; });
  }
  add_to_sum(work.sum, softmax.rescale[0], load(sums));
}

/// Multiplies a tile's scores by the scales of its keys.
template <typename Storage>
void apply_scales(const WorkTile<float>& work, std::int32_t pitch, const TileRows<Storage>& rows,
                  std::int32_t keys) {
  if constexpr (kHasScales<Storage>) {
    for (std::int32_t row = 0; row < work.rows; ++row) {
      for_key_vectors(keys, [&](std::int32_t key, __mmask16 mask) {
        float* s = work.scores + row * pitch + key;
        _mm512_mask_storeu_ps(s, mask, (__m512)(load_scores(s, mask) * load(rows.scale + key)));
      });
    }
  }
}

/// S = Q K^T of rows that are widened to f32 in registers.
struct WidenedDots {
  /// Whether rows of K and V are read where they are; otherwise from copies in the compute type.
  template <typename Storage>
  static constexpr bool kInPlace = true;

  explicit WidenedDots(const WorkTile<float>&) {}

  template <typename Storage>
  void score(const WorkTile<float>& work, std::int32_t pitch, const TileRows<Storage>& k,
             std::int32_t keys, NextRows<Storage> next) const {
    const std::int32_t head_dim = work.params.head_dim;
    const float* q = static_cast<const float*>(work.q_tile);
    for_row_blocks(work.rows, [&]<int R>(std::int32_t row) {
      constexpr int kKeys = 16 / R;
      for (std::int32_t key = 0; key < keys; key += kKeys) {
        const std::int32_t count = keys - key < kKeys ? keys - key : kKeys;
        for (std::int32_t i = 0; i < count; ++i) next.fetch(key + i);
        score_block<R>(work.scores + row * pitch + key, pitch, q + row * head_dim, head_dim,
                       k.row + key, count);
      }
      next.count = 0;
    });
  }
};

/// One KV tile. `next_k` has the rows of the next tile's K, which are fetched while this one's V is
/// multiplied, as V is while K is.
template <typename Dots, typename Storage>
void process_rows(const WorkTile<float>& work, const Dots& dots, const TileRows<Storage>& k,
                  const TileRows<Storage>& v, KeyRange tile, const TileRows<Storage>& next_k,
                  std::int32_t next_keys) {
  const AttentionParams& p = work.params;
  const std::int32_t keys = tile.end - tile.begin, pitch = p.tile_k;
  const auto k_bytes = static_cast<std::int64_t>(p.head_dim * sizeof(Storage));
  const auto v_bytes = static_cast<std::int64_t>(p.v_dim * sizeof(Storage));
  dots.score(work, pitch, k, keys, {v.row, keys, v_bytes});
  apply_scales(work, pitch, k, keys);
  modify_rows(work, pitch, tile);
  alignas(64) float largest[kRowLanes];
  find_row_maxima(work, pitch, keys, largest);
  const PanelSoftmax<1, float> softmax = update_max<1>(largest, 1, work.max, p.fault);
  exponentiate_rows(work, pitch, v, keys, softmax);
  alignas(64) float rescale[kRowLanes];
  store(rescale, softmax.rescale[0]);
  for_row_blocks(work.rows, [&]<int R>(std::int32_t row) {
    output_rows<R>(work.out_tile + row * p.v_dim, p.v_dim, work.scores + row * pitch, pitch, v.row,
                   keys, rescale + row, {next_k.row, row == 0 ? next_keys : 0, k_bytes});
  });
}

/// The KV tiles of a work tile, whose rows are read where they are.
template <typename Storage, typename Dots>
void mainloop_in_place(const WorkTile<float>& work, const Dots& dots, KeyRange visible,
                       const core::KvRowMap& map, const KeyTensor& k, const KeyTensor& v) {
  const std::int32_t tile_k = work.params.tile_k;
  const auto tile_at = [&](std::int32_t first) {
    return core::intersect(visible, {first, first + tile_k});
  };
  TileRows<Storage> k_rows[2], v_rows;
  std::int32_t first = core::tile_begin(visible.begin, tile_k);
  k_rows[0].find(work, k, map, tile_at(first));
  for (int buffer = 0; first < visible.end; first += tile_k, buffer ^= 1) {
    if (core::is_set(work.cancel)) return;
    const KeyRange tile = tile_at(first), next = tile_at(first + tile_k);
    const std::int32_t next_keys = next.empty() ? 0 : next.end - next.begin;
    if (next_keys > 0) k_rows[buffer ^ 1].find(work, k, map, next);
    if (is_hidden_tile(work, tile)) continue;
    v_rows.find(work, v, map, tile);
    process_rows(work, dots, k_rows[buffer], v_rows, tile, k_rows[buffer ^ 1], next_keys);
  }
}

/// The same with copies in the compute type.
template <typename Storage>
void mainloop_copied(const WorkTile<float>& work, KeyRange visible, const core::KvRowMap& map,
                     const KeyTensor& k, const KeyTensor& v) {
  const std::int32_t tile_k = work.params.tile_k;
  float* k_copy = static_cast<float*>(work.k_tile);
  float* v_copy = static_cast<float*>(work.v_tile);
  TileRows<float> k_rows, v_rows;
  for (std::int32_t first = core::tile_begin(visible.begin, tile_k); first < visible.end;
       first += tile_k) {
    if (core::is_set(work.cancel)) return;
    const KeyRange tile = core::intersect(visible, {first, first + tile_k});
    if (is_hidden_tile(work, tile)) continue;
    load_tile<float, Storage>(k_copy, k, work, map, tile);
    load_tile<float, Storage>(v_copy, v, work, map, tile);
    k_rows.find(k_copy, k.columns, tile);
    v_rows.find(v_copy, v.columns, tile);
    process_rows(work, WidenedDots(work), k_rows, v_rows, tile, k_rows, 0);
  }
}

/// The TileFunction of few rows (cpu/kernel.h). Dots multiplies Q by the rows of K that are read in
/// memory.
template <typename Storage, typename Dots = WidenedDots>
struct RowsLoop {
  using Compute = float;
  static constexpr core::CpuOperands kOperands = core::CpuOperands::compute;

  static void run(const WorkTile<float>& work) {
    const AttentionParams& p = work.params;
    for (std::int32_t row = 0; row < work.rows; ++row) {
      load_query<float, Storage>(static_cast<float*>(work.q_tile) + row * p.head_dim, work, row,
                                 core::score_scale<float>(p));
    }
    for (int r = 0; r < kRowLanes; ++r) {
      work.max[r] = core::negative_infinity<float>();
      work.sum[r] = 0.f;
    }
    for (std::int64_t i = 0; i < std::int64_t{work.rows} * p.v_dim; ++i) work.out_tile[i] = 0.f;
    const KeyRange visible = visible_to_tile(work);
    if (!visible.empty()) {
      const core::KvRowMap map = core::kv_row_map(p, work.sequence, work.b);
      read_keys(work, visible, map, k_tensor(p), v_tensor(p));
      if (core::is_set(work.cancel)) return;
    }
    for (std::int32_t row = 0; row < work.rows; ++row) {
      store_row(work, row, work.out_tile + row * p.v_dim);
    }
  }

 private:
  static void read_keys(const WorkTile<float>& work, KeyRange visible, const core::KvRowMap& map,
                        const KeyTensor& k, const KeyTensor& v) {
    const Dots dots(work);
    const auto in_place = [&]<typename Row>() {
      if constexpr (Dots::template kInPlace<Row>) {
        mainloop_in_place<Row>(work, dots, visible, map, k, v);
      } else {
        mainloop_copied<Storage>(work, visible, map, k, v);
      }
    };
    const bool any_8bit = core::is_8bit(k.element) || core::is_8bit(v.element);
    const bool all_codes = (core::code_mask(work.params) & 0xff) == 0xff;  // not under a fault
    if (k.strides.column == 1 && v.strides.column == 1) {
      if (!any_8bit) return in_place.template operator()<Storage>();
      if (k.element == v.element && all_codes) {
        switch (k.element) {
          case core::Element::e4m3:
            return in_place.template operator()<Code<core::Element::e4m3>>();
          case core::Element::e5m2:
            return in_place.template operator()<Code<core::Element::e5m2>>();
          case core::Element::int8:
            return in_place.template operator()<Code<core::Element::int8>>();
          default: return in_place.template operator()<Code<core::Element::u8>>();
        }
      }
    }
    mainloop_copied<Storage>(work, visible, map, k, v);
  }
};

}  // namespace
}  // namespace flashcore::cpu
