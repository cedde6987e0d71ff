// Appending keys and values to a cache: what goes where, and as which codes where the cache is
// 8-bit and the new rows are not. The CPU loop (cpu/append.cc) and the CUDA kernel
// (cuda/common/append.cu) only walk over the rows.
#pragma once

#include "core/element.h"
#include "core/quant_formats.h"
#include "core/row_offset.h"
#include "core/seq_info.h"

namespace flashcore::core {

/// New rows of K or of V, and the cache they go to.
struct AppendTensor {
  const void*
      from;  // [batch, kv_heads, new_len, columns], or packed [total_new, kv_heads, columns]
  void* to;  // [batch, kv_heads, capacity, columns], or pages of it
  Strides from_strides, to_strides;  // packed: batch stride 0
  std::int32_t columns;
  bool vectors;        // rows are contiguous in both, 16-byte aligned and of whole 16-byte pieces
  bool quantizes;      // from is f32, f16 or bf16, to is 8-bit; else both are of one type
  std::int32_t bytes;  // of an element of to
  Element wide, code;  // where it quantizes
  Scales scales;       // of to
};

struct AppendParams {
  AppendTensor k, v;
  const std::int32_t* used_k;          // [batch]: keys before the append
  const std::int32_t* cu_seqlens_new;  // [batch + 1] or null
  std::int64_t used_k_stride;
  PageTable pages;
  std::int32_t batch, kv_heads;
  std::int32_t new_len;   // new keys of each sequence; packed: total_new
  std::int32_t capacity;  // keys a sequence can have
  ErrorSlot* error;       // null: what is wrong is skipped and nobody told
};

/// Sequence b's part of an append, of which nothing lies outside the cache.
struct AppendRange {
  std::int32_t used;     // the cache's first new key
  std::int32_t count;    // new keys that fit
  std::int32_t new_row;  // packed: the first of them in the new rows
  ErrorSlot error;       // code 0: all was well
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
  // Rows at a clamped position would overwrite what the caller meant to keep: none is written.
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

/// Rows of work: one for each new key and KV head of the batch.
FLASHCORE_HD std::int64_t append_rows(const AppendParams& p) {
  const std::int64_t keys =
      p.cu_seqlens_new != nullptr ? p.new_len : static_cast<std::int64_t>(p.batch) * p.new_len;
  return keys * p.kv_heads;
}

/// Where one row of work comes from and goes to.
struct AppendRow {
  bool skipped;  // belongs to no sequence, or has no place in the cache
  std::int32_t head;
  std::int32_t b, key;  // its sequence, and which key of it it becomes
  KvLocation from, to;
  ErrorSlot error;
};

/// The sequence that holds a packed row: the last one that begins at or before it.
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

/// What a new row is multiplied by before encode().
FLASHCORE_HD float append_factor(const AppendTensor& t, const AppendRow& row) {
  return inverse_step(t.code, t.scales.at(row.b, row.head, row.key));
}

/// What is wrong with a row's scale; code 0: nothing. of_v: it is V's.
FLASHCORE_HD ErrorSlot append_scale_error(const AppendTensor& t, const AppendRow& row, bool of_v) {
  if (!t.quantizes) return {};
  const float scale = t.scales.at(row.b, row.head, row.key);
  if (scale > 0.f && scale < __builtin_inff()) return {};
  return {
      static_cast<std::int32_t>(of_v ? ErrorCode::appended_v_scale : ErrorCode::appended_k_scale),
      row.b, row.key, row.head};
}

/// A row that holds a NaN for which there is no code.
FLASHCORE_HD ErrorSlot append_nan_error(const AppendRow& row, bool of_v) {
  return {static_cast<std::int32_t>(of_v ? ErrorCode::appended_v_nan : ErrorCode::appended_k_nan),
          row.b, row.key, row.head};
}

}  // namespace flashcore::core
