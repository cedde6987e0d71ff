// Appends keys and values to a KV cache: the destination of each new row, and its quantization if
// the cache is 8-bit and the new rows are not. The CPU loop (cpu/append.cc) and the CUDA kernel
// (cuda/common/append.cu) only iterate over the rows.
#pragma once

#include "core/element.h"
#include "core/quant_formats.h"
#include "core/row_offset.h"
#include "core/seq_info.h"

namespace flashcore::core {

/// New rows of K or V, and the cache that they go to.
struct AppendTensor {
  // from: [batch, kv_heads, new_len, columns], or varlen [total_new, kv_heads, columns].
  // to: [batch, kv_heads, capacity, columns], or pages.
  const void* from;
  void* to;
  Strides from_strides, to_strides;  // varlen: batch stride 0
  std::int32_t columns;
  bool vectors;        // rows of both: contiguous, 16-byte aligned, a multiple of 16 bytes long
  bool quantizes;      // from is f32, f16 or bf16, to is 8-bit; false: both have one type
  std::int32_t bytes;  // per element of to
  Element wide, code;  // formats of from and to, if it quantizes
  Scales scales;       // of to
};

struct AppendParams {
  AppendTensor k, v;
  const std::int32_t* used_k;          // [batch]: keys before the append
  const std::int32_t* cu_seqlens_new;  // [batch + 1] or null
  std::int64_t used_k_stride;
  PageTable pages;
  std::int32_t batch, kv_heads;
  std::int32_t new_len;   // new keys of each sequence; varlen: total_new
  std::int32_t capacity;  // keys that a sequence can have
  ErrorSlot* error;       // null: invalid rows are skipped without a report
};

/// The new keys of one sequence that fit into the cache.
struct AppendRange {
  std::int32_t used;     // keys before the append: index of the first new key
  std::int32_t count;    // new keys that fit
  std::int32_t new_row;  // varlen: row of the first new key
  ErrorSlot error;       // code 0: no error
};

FLASHCORE_HD AppendRange append_range(const AppendParams& p, std::int32_t b) {
  AppendRange r{};
  std::int32_t wanted = p.new_len;
  if (p.cu_seqlens_new != nullptr) {
    r.new_row = detail::clamp_noting(p.cu_seqlens_new[b], 0, p.new_len, r.error,
                                     ErrorCode::cu_seqlens_new_invalid, b, b);
    wanted = detail::clamp_noting(p.cu_seqlens_new[b + 1], r.new_row, p.new_len, r.error,
                                  ErrorCode::cu_seqlens_new_invalid, b, b + 1) -
             r.new_row;
  }
  // A sequence with an invalid length gets no rows: a clamped position would overwrite valid keys.
  const std::int32_t used = p.used_k[b * p.used_k_stride];
  r.used = detail::clamp_noting(used, 0, p.capacity, r.error, ErrorCode::used_k_out_of_range, b, b);
  if (r.used != used) return r;
  r.count = wanted < p.capacity - used ? wanted : p.capacity - used;
  if (r.count < wanted && r.error.code == 0) {
    r.error = {static_cast<std::int32_t>(ErrorCode::append_past_capacity), b, b,
               static_cast<std::int64_t>(used) + wanted};
  }
  return r;
}

/// Number of rows to append: one for each new key and KV head of the batch.
FLASHCORE_HD std::int64_t append_rows(const AppendParams& p) {
  const std::int64_t keys =
      p.cu_seqlens_new != nullptr ? p.new_len : static_cast<std::int64_t>(p.batch) * p.new_len;
  return keys * p.kv_heads;
}

/// Source and destination of one row.
struct AppendRow {
  bool skipped;  // belongs to no sequence, or has no valid destination
  std::int32_t head;
  std::int32_t b, key;  // its sequence, and its key index in the sequence
  KvLocation from, to;
  ErrorSlot error;
};

/// The sequence of a varlen row: the last one that begins at or before it.
FLASHCORE_HD std::int32_t sequence_of_row(const std::int32_t* cu_seqlens, std::int32_t batch,
                                          std::int32_t row) {
  std::int32_t low = 0, high = batch;
  while (high - low > 1) {
    const std::int32_t middle = low + (high - low) / 2;
    (cu_seqlens[middle] <= row ? low : high) = middle;
  }
  return low;
}

FLASHCORE_HD AppendRow append_row(const AppendParams& p, std::int64_t index) {
  AppendRow row{};
  row.head = static_cast<std::int32_t>(index % p.kv_heads);
  const std::int64_t key = index / p.kv_heads;
  const bool packed = p.cu_seqlens_new != nullptr;
  const std::int32_t b =
      packed ? sequence_of_row(p.cu_seqlens_new, p.batch, static_cast<std::int32_t>(key))
             : static_cast<std::int32_t>(key / p.new_len);
  const AppendRange range = append_range(p, b);
  const auto i = static_cast<std::int32_t>(packed ? key - range.new_row : key % p.new_len);
  row.error = range.error;
  row.skipped = i < 0 || i >= range.count;
  if (row.skipped) return row;
  row.b = b;
  row.key = range.used + i;
  row.from = packed ? KvLocation{0, static_cast<std::int32_t>(key)} : KvLocation{b, i};
  if (p.pages.table != nullptr) {
    const ErrorSlot found = page_error(p.pages, b, p.pages.page_index(range.used + i));
    if (found.code != 0) {
      row.skipped = true;
      if (row.error.code == 0) row.error = found;
      return row;
    }
  }
  row.to = kv_row_map(p.pages, b, 0).at(range.used + i);
  return row;
}

/// The factor of a new row before encode().
FLASHCORE_HD float append_factor(const AppendTensor& t, const AppendRow& row) {
  return inverse_step(t.code, t.scales.at(row.b, row.head, row.key));
}

/// The error of a row's scale; code 0: none. of_v: the row is V's.
FLASHCORE_HD ErrorSlot append_scale_error(const AppendTensor& t, const AppendRow& row, bool of_v) {
  if (!t.quantizes) return {};
  const float scale = t.scales.at(row.b, row.head, row.key);
  if (scale > 0.f && scale < __builtin_inff()) return {};
  return {
      static_cast<std::int32_t>(of_v ? ErrorCode::appended_v_scale : ErrorCode::appended_k_scale),
      row.b, row.key, row.head};
}

/// The error of a row with a NaN that the cache's format cannot represent.
FLASHCORE_HD ErrorSlot append_nan_error(const AppendRow& row, bool of_v) {
  return {static_cast<std::int32_t>(of_v ? ErrorCode::appended_v_nan : ErrorCode::appended_k_nan),
          row.b, row.key, row.head};
}

}  // namespace flashcore::core
