// The work tile of the CPU kernel, its rows of Q, K and V in memory, and the loads of Q, K and V
// tiles in the compute type, which widen and dequantise.
#pragma once

#include "core/params.h"
#include "core/quant_formats.h"
#include "core/row_offset.h"
#include "core/score.h"
#include "core/seq_info.h"
#include "cpu/kernels/simd.h"

namespace flashcore::cpu {
namespace {

using core::AttentionParams;
using core::InjectedFault;
using core::KeyRange;

inline constexpr std::int32_t kMaxDim = 576;

/// A work tile: its coordinates and its scratch memory.
template <typename T>
struct WorkTile {
  const AttentionParams& params;
  const std::int32_t* cancel;
  core::SeqInfo sequence;
  std::int32_t b, kv_head, split;
  std::int64_t first_row;  // of the q_len * group rows of a KV head
  std::int32_t rows;
  // Scratch memory (core/scratch.h). The packed operands have the format of the GEMM
  // (gemm-inl.h). A panel of rows is contiguous: out_tile[panel][v_dim][rows of a panel].
  void* q_tile;
  void* k_tile;
  void* v_tile;
  void* p_tile;
  T* scores;  // S^T[key][row] of one panel
  T* out_tile;
  T* max;
  T* sum;

  std::int32_t query_of(std::int32_t row) const {
    return static_cast<std::int32_t>((first_row + row) / params.group);
  }
  std::int32_t head_of(std::int32_t row) const {
    const auto in_group = static_cast<std::int32_t>((first_row + row) % params.group);
    if (params.fault.is(InjectedFault::gqa_map_wrong)) return in_group * params.kv_heads + kv_head;
    return kv_head * params.group + in_group;
  }
};

// core::decode() of every 8-bit value.
inline constexpr core::DecodeTable kE4m3Values = core::decode_table(core::Element::e4m3);
inline constexpr core::DecodeTable kE5m2Values = core::decode_table(core::Element::e5m2);
inline constexpr core::DecodeTable kInt8Values = core::decode_table(core::Element::int8);
inline constexpr core::DecodeTable kByteValues = core::decode_table(core::Element::u8);

const float* values_of(core::Element element) {
  switch (element) {
    case core::Element::e4m3: return kE4m3Values.value;
    case core::Element::e5m2: return kE5m2Values.value;
    case core::Element::int8: return kInt8Values.value;
    default: return kByteValues.value;
  }
}

/// Calls visit(r, row in memory, key) for r in [0, count): the keys first + r of one head's K or V.
template <typename Storage, typename Visit>
void for_each_key(const Storage* g_head, const core::Strides& strides,
                  const core::KvRowMap& kv_row_map, std::int32_t first, std::int32_t count,
                  Visit visit) {
  const Storage* from = g_head;
  std::int32_t run_end = 0;  // end of the current run of adjacent rows
  for (std::int32_t r = 0; r < count; ++r, from += strides.row) {
    if (r == run_end) {
      const core::KvLocation location = kv_row_map.at(first + r);
      from = g_head + location.block * strides.batch + location.row * strides.row;
      const std::int32_t run = kv_row_map.run_from(first + r);
      run_end = run < count - r ? r + run : count;
    }
    visit(r, from, first + r);
  }
}

/// The keys of the work tile's split that one of its rows sees.
template <typename T>
KeyRange visible_to_tile(const WorkTile<T>& work) {
  return core::intersect(
      core::keys_seen_by_any(work.sequence.mask, work.query_of(0), work.query_of(work.rows - 1)),
      core::split_keys(work.split, work.params.keys_per_split, work.sequence.kv_len));
}

/// K or V as stored: in the kernel's type, or in 8 bits with scales.
struct KeyTensor {
  const void* g_data;
  const core::Strides& strides;
  core::Element element;
  const core::Scales& scales;
  std::int32_t columns;
};

inline KeyTensor k_tensor(const AttentionParams& p) {
  return {p.k, p.k_strides, p.k_element, p.k_scale, p.head_dim};
}
inline KeyTensor v_tensor(const AttentionParams& p) {
  return {p.v, p.v_strides, p.v_element, p.v_scale, p.v_dim};
}

template <typename T, typename Storage>
inline constexpr bool kIsSame = false;
template <typename T>
inline constexpr bool kIsSame<T, T> = true;

/// A KV tile of K or V in the compute type: row r starts at data + r * stride.
template <typename T>
struct AdjacentKeys {
  const T* data;
  std::int64_t stride;
};

/// The rows of a KV tile: in memory if they need no conversion and follow each other, otherwise in
/// `packed`, which load_tile() fills. Rows that lie further apart would share few sets of the L1
/// cache.
template <typename T, typename Storage>
AdjacentKeys<T> rows_of_tile(const T* packed, const KeyTensor& t, std::int32_t kv_head,
                             const core::KvRowMap& kv_row_map, KeyRange keys) {
  if constexpr (kIsSame<T, Storage>) {
    if (!core::is_8bit(t.element) && t.strides.column == 1 && t.strides.row == t.columns &&
        kv_row_map.run_from(keys.begin) >= keys.end - keys.begin) {
      const core::KvLocation at = kv_row_map.at(keys.begin);
      return {static_cast<const T*>(t.g_data) + core::row_offset(t.strides, at, kv_head),
              t.columns};
    }
  }
  return {packed, t.columns};
}

/// Copies the keys of a KV tile to tile[keys][columns], dequantised and in the compute type.
template <typename T, typename Storage>
void load_tile(T* tile, const KeyTensor& t, const WorkTile<T>& work,
               const core::KvRowMap& kv_row_map, KeyRange keys) {
  const core::Strides& strides = t.strides;
  const std::int32_t columns = t.columns, count = keys.end - keys.begin;
  const std::int64_t head = work.kv_head * strides.head;
  if (core::is_8bit(t.element)) {
    const float* values = values_of(t.element);
    const std::uint32_t mask = core::code_mask(work.params) & 0xff;
    for_each_key(static_cast<const std::uint8_t*>(t.g_data) + head, strides, kv_row_map, keys.begin,
                 count, [&](std::int32_t r, const std::uint8_t* from, std::int32_t key) {
                   T* to = tile + static_cast<std::int64_t>(r) * columns;
                   const float scale =
                       core::row_scale(work.params, t.element, t.scales, work.b, work.kv_head, key);
                   for (std::int32_t c = 0; c < columns; ++c) {
                     to[c] = static_cast<T>(values[from[c * strides.column] & mask] * scale);
                   }
                 });
    return;
  }
  for_each_key(static_cast<const Storage*>(t.g_data) + head, strides, kv_row_map, keys.begin, count,
               [&](std::int32_t r, const Storage* from, std::int32_t) {
                 T* to = tile + static_cast<std::int64_t>(r) * columns;
                 std::int32_t c = 0;
                 if (strides.column == 1) {
                   for (; c + kLanes<T> <= columns; c += kLanes<T>) widen_lanes(to + c, from + c);
                 }
                 for (; c < columns; ++c) to[c] = widen<T>(from[c * strides.column]);
               });
}

/// Loads one row of Q without any scale. Returns the scale of an 8-bit row, otherwise 1.
template <typename T, typename Storage>
float load_query_values(T* to, const WorkTile<T>& work, std::int32_t row) {
  const AttentionParams& p = work.params;
  const std::int32_t head = work.head_of(row), query = work.query_of(row);
  const std::int64_t at = core::row_offset(p.q_strides, work.b, head, work.sequence.q_row + query);
  float scale = 1.f;
  if (core::is_8bit(p.q_element)) {
    const std::uint8_t* from = static_cast<const std::uint8_t*>(p.q) + at;
    const float* values = values_of(p.q_element);
    scale = core::row_scale(p, p.q_element, p.q_scale, work.b, head, query);
    const std::uint32_t mask = core::code_mask(p) & 0xff;
    for (std::int32_t d = 0; d < p.head_dim; ++d) {
      to[d] = static_cast<T>(values[from[d * p.q_strides.column] & mask]);
    }
  } else {
    const Storage* from = static_cast<const Storage*>(p.q) + at;
    std::int32_t d = 0;
    if (p.q_strides.column == 1) {
      for (; d + kLanes<T> <= p.head_dim; d += kLanes<T>) store(to + d, load_widened(from + d));
    }
    for (; d < p.head_dim; ++d) to[d] = widen<T>(from[d * p.q_strides.column]);
  }
  if (p.fault.is(InjectedFault::head_dim_truncated)) to[p.head_dim - 1] = T(0);
  return scale;
}

/// Loads one row of Q, scaled.
template <typename T, typename Storage>
void load_query(T* to, const WorkTile<T>& work, std::int32_t row, T factor) {
  const float scale = load_query_values<T, Storage>(to, work, row);
  for (std::int32_t d = 0; d < work.params.head_dim; ++d) {
    to[d] = to[d] * static_cast<T>(scale) * factor;
  }
}

/// Loads Q of the tile, scaled and transposed: q_tile[panel][d][row in panel]. Rows past the end
/// are 0.
template <typename T, typename Storage>
void load_queries(T* q_tile, const WorkTile<T>& work, int panel_rows) {
  constexpr std::int32_t kRows = kLanes<T>;
  const std::int32_t head_dim = work.params.head_dim;
  const T factor = core::score_scale<T>(work.params);
  T rows[kRows][kMaxDim];
  const std::int32_t padded_rows = (work.rows + panel_rows - 1) / panel_rows * panel_rows;
  for (std::int32_t first = 0; first < padded_rows; first += kRows) {
    for (std::int32_t r = 0; r < kRows; ++r) {
      if (first + r < work.rows) {
        load_query<T, Storage>(rows[r], work, first + r, factor);
      } else {
        for (std::int32_t d = 0; d < head_dim; ++d) rows[r][d] = T(0);
      }
    }
    T* to = q_tile + static_cast<std::int64_t>(first / panel_rows) * panel_rows * head_dim +
            first % panel_rows;
    transpose_rows<T>(to, panel_rows, &rows[0][0], kMaxDim, head_dim);
  }
}

}  // namespace
}  // namespace flashcore::cpu
