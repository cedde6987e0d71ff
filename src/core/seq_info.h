// Lengths and positions of one sequence of the batch.
#pragma once

#include "core/mask.h"
#include "core/params.h"

namespace flashcore::core {

struct SeqInfo {
  std::int32_t q_len;
  std::int32_t kv_len;
  std::int32_t q_row;  // first row in varlen q, out and lse; 0 if they are dense
  std::int32_t k_row;  // first row in varlen k and v; 0 if they are not varlen
  Mask mask;
  ErrorSlot error;  // code 0: no error. Only checked calls read it.
};

namespace detail {

/// Clamps value to [low, high]. Records the first value out of range in slot.
FLASHCORE_HD std::int32_t clamp_noting(std::int64_t value, std::int64_t low, std::int64_t high,
                                       ErrorSlot& slot, ErrorCode code, std::int32_t batch,
                                       std::int64_t index) {
  if (value >= low && value <= high) return static_cast<std::int32_t>(value);
  if (slot.code == 0) slot = {static_cast<std::int32_t>(code), batch, index, value};
  return static_cast<std::int32_t>(value < low ? low : high);
}

}  // namespace detail

/// Every sequence of a call without lengths and starts.
FLASHCORE_HD SeqInfo dense_seq_info(const AttentionParams& params) {
  SeqInfo s{};
  s.q_len = params.q_len;
  s.kv_len = params.kv_len;
  s.mask = {static_cast<std::int64_t>(s.kv_len) - s.q_len, params.window_left, params.window_right,
            s.kv_len, params.fault};
  return s;
}

/// Reads the lengths and starts of sequence b. Clamps invalid input, so that the result is always
/// inside the capacities. Valid input is unchanged.
FLASHCORE_HD SeqInfo seq_info_of(const AttentionParams& params, std::int32_t b) {
  SeqInfo s{};
  s.q_len = params.q_len;
  s.kv_len = params.kv_len;
  if (params.cu_seqlens_q != nullptr) {
    const std::int64_t begin = params.cu_seqlens_q[b];
    const std::int64_t end = params.cu_seqlens_q[b + 1];
    s.q_row = detail::clamp_noting(begin, 0, params.total_q, s.error,
                                   ErrorCode::cu_seqlens_q_invalid, b, b);
    const std::int64_t room = min64(params.q_len, params.total_q - s.q_row);
    s.q_len = detail::clamp_noting(end, s.q_row, s.q_row + room, s.error,
                                   ErrorCode::cu_seqlens_q_invalid, b, b + 1) -
              s.q_row;
  }
  if (params.cu_seqlens_k != nullptr) {
    const std::int64_t begin = params.cu_seqlens_k[b];
    const std::int64_t end = params.cu_seqlens_k[b + 1];
    s.k_row = detail::clamp_noting(begin, 0, params.total_k, s.error,
                                   ErrorCode::cu_seqlens_k_invalid, b, b);
    const std::int64_t room = min64(params.kv_len, params.total_k - s.k_row);
    s.kv_len = detail::clamp_noting(end, s.k_row, s.k_row + room, s.error,
                                    ErrorCode::cu_seqlens_k_invalid, b, b + 1) -
               s.k_row;
  }
  if (params.used_k != nullptr) {
    s.kv_len = detail::clamp_noting(params.used_k[b * params.used_k_stride], 0, s.kv_len, s.error,
                                    ErrorCode::used_k_out_of_range, b, b);
  }
  std::int64_t q_start = static_cast<std::int64_t>(s.kv_len) - s.q_len;  // bottom-right
  std::int64_t k_start = 0;
  if (params.q_start != nullptr) {
    q_start = detail::clamp_noting(params.q_start[b * params.q_start_stride], -kMaxStart, kMaxStart,
                                   s.error, ErrorCode::q_start_out_of_range, b, b);
  }
  if (params.k_start != nullptr) {
    k_start = detail::clamp_noting(params.k_start[b * params.k_start_stride], -kMaxStart, kMaxStart,
                                   s.error, ErrorCode::k_start_out_of_range, b, b);
  }
  s.mask = {q_start - k_start, params.window_left, params.window_right, s.kv_len, params.fault};
  return s;
}

/// The same sequence without its first `keys` keys, which no query sees. It has no pages.
FLASHCORE_HD constexpr void drop_first_keys(SeqInfo& s, std::int32_t keys) {
  s.k_row += keys;
  s.kv_len -= keys;
  s.mask = without_first_keys(s.mask, keys);
}

/// The locations of sequence b's keys in K and V.
FLASHCORE_HD KvRowMap kv_row_map(const AttentionParams& params, const SeqInfo& s, std::int32_t b) {
  if (params.fault.is(InjectedFault::pages_of_first) && params.pages.table != nullptr) {
    return kv_row_map(params.pages, 0, s.k_row);
  }
  return kv_row_map(params.pages, b, s.k_row);
}

/// The number of entries that a sequence of `keys` keys uses in its row of the block table.
FLASHCORE_HD std::int32_t slots_in_use(const PageTable& pages, std::int32_t keys) {
  return pages.table == nullptr || keys == 0 ? 0 : pages.page_index(keys - 1) + 1;
}

/// The error of entry `slot` in sequence b's row of the block table; code 0: none.
FLASHCORE_HD ErrorSlot page_error(const PageTable& pages, std::int32_t b, std::int32_t slot) {
  const std::int32_t id = pages.table[b * pages.table_stride + slot];
  if (pages.valid(id)) return {};
  return {static_cast<std::int32_t>(ErrorCode::page_id_out_of_range), b, slot, id};
}

/// The KV head that query head h reads.
FLASHCORE_HD std::int32_t kv_head_of(const AttentionParams& params, std::int32_t h) {
  if (params.fault.is(InjectedFault::gqa_map_wrong)) return h % params.kv_heads;
  return h / params.group;
}

}  // namespace flashcore::core
