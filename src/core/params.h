// The launch arguments of every kernel: one trivial struct that backend/params.cc fills from a plan
// and the caller's tensors. CPU and CUDA kernels read it.
#pragma once

#include <cstdint>

#include "core/block_mask.h"
#include "core/fast_divmod.h"
#include "core/fault.h"
#include "core/paged_kv.h"
#include "core/score_mods.h"
#include "core/softmax.h"
#include "core/strides.h"

namespace flashcore::core {

/// Element formats that a kernel reads at run time: those of out and bias, and of 8-bit q, k and v.
/// Wider formats of q, k and v are template parameters.
enum class Element : std::int32_t { none, f64, f32, f16, bf16, e4m3, e5m2, int8, u8 };

FLASHCORE_HD constexpr bool is_8bit(Element element) { return element >= Element::e4m3; }

/// The scales of an 8-bit tensor.
struct Scales {
  const float* data;                // [batch, heads, blocks]; null: 1 everywhere
  std::int64_t batch, head, block;  // strides; 0 repeats
  std::int32_t block_rows;          // rows per scale; not 0

  FLASHCORE_HD float at(std::int32_t b, std::int32_t h, std::int32_t row) const {
    return data == nullptr ? 1.f : *address(b, h, row);
  }
  /// Requires data != nullptr.
  FLASHCORE_HD const float* address(std::int32_t b, std::int32_t h, std::int32_t row) const {
    return data + b * batch + h * head + row / block_rows * block;
  }
  /// True if the rows of a head have several scales.
  FLASHCORE_HD bool is_per_block() const { return data != nullptr && block != 0; }
};

/// Errors that a kernel writes to the error slot of the workspace.
enum class ErrorCode : std::int32_t {
  none = 0,
  cu_seqlens_q_invalid = 1,  // decreasing, negative, past total_q or longer than max_q_len
  cu_seqlens_k_invalid = 2,
  used_k_out_of_range = 3,
  q_start_out_of_range = 4,
  k_start_out_of_range = 5,
  page_id_out_of_range = 6,  // index: entry in the sequence's row of block_table
  append_past_capacity = 7,  // value: the length that the sequence would have
  cu_seqlens_new_invalid = 8,
  quantized_nan = 9,  // index: row-major, of the element; value: 1 if rows are rotated
  // A new row that an append quantizes. index: its key; value: its KV head.
  appended_k_nan = 10,
  appended_v_nan = 11,
  appended_k_scale = 12,  // not positive and finite
  appended_v_scale = 13,
};

struct ErrorSlot {
  std::int32_t code;  // ErrorCode; 0: no error
  std::int32_t batch;
  std::int64_t index;
  std::int64_t value;
};

/// The workspace header holds the error slot, then the counters.
inline constexpr std::int64_t kCountersOffset = 256;
inline constexpr std::int64_t kMaxCounters = (64 * 1024 - kCountersOffset) / 4;
inline constexpr int kMaxCombinedSplits = 128;  // limit of CombineMode::last_cta

/// Limit on |q_start| and |k_start|: a position plus any length fits in 31 bits.
inline constexpr std::int32_t kMaxStart = 1 << 30;

// The fields that every call needs come first, close together: a starting CTA stalls on each cache
// line of parameters that it reads for the first time.
struct AttentionParams {
  // Tensors. Varlen q, out and lse (cu_seqlens_q) and varlen k and v have batch stride 0.
  const void* q;  // [batch, q_heads, q_len, head_dim]
  const void* k;  // [batch or pages, kv_heads, kv_len or page, head_dim]
  const void* v;  // [batch or pages, kv_heads, kv_len or page, v_dim]
  void* out;      // [batch, q_heads, q_len, v_dim]
  void* lse;      // [batch, q_heads, q_len] or null
  Strides q_strides, k_strides, v_strides, out_strides, lse_strides;

  // Sizes. q_len and kv_len are capacities; core/seq_info.h has the lengths of one sequence.
  std::int32_t batch, q_heads, kv_heads, group;  // group = q_heads / kv_heads
  std::int32_t q_len, kv_len, head_dim, v_dim;
  std::int32_t total_q, total_k;

  // Work tiles: (batch, head, query tile, split).
  std::int32_t tile_q, tile_k, q_tiles, splits;
  std::int64_t keys_per_split;  // a multiple of tile_k
  std::int64_t num_tiles;
  FastDivmod group_divmod, q_tiles_divmod, kv_heads_divmod, split_keys_divmod;
  // Divides a CTA index by num_tiles / splits, so that CTAs of one split are adjacent; with
  // cluster_combine by splits, so that CTAs of one work tile are adjacent.
  FastDivmod cta_divmod;
  bool cluster_combine;  // the CTAs of a cluster compute the splits of one work tile

  // Scores. score_scale * Q K^T is the score; with a softcap, the argument of core::capped().
  double score_scale;
  double softcap;                          // 0: none
  float softmax_scale_log2;                // scale * log2(e), for kernels that scale in the softmax
  std::int64_t window_left, window_right;  // -1: all; causal is window_right = 0
  bool vector_rows;  // q, k, v, out rows are contiguous, 16-byte aligned, a multiple of 4 long
  bool async_rows;   // q, k, v rows are contiguous and 16-byte aligned: cp.async can fetch them
  bool checked;
  bool fast_path;  // the kernel family has a fast path for these scores and this layout
  bool is_varlen;  // sequences have their own lengths or starts
  bool
      fast_layout;  // vector_rows, async_rows, and rows fill the kernel's dims or its tile is large
  std::uint8_t score_mods;  // ScoreMods

  // Partial results, only if splits > 1; f64 for f64 problems. LSE: natural, without sinks.
  void* partial_out;  // [splits, partial_rows(), v_dim]
  void* partial_lse;  // [splits, partial_rows()]
  // [num_tiles / splits], all 0 between calls. A kernel that has them combines the partial results
  // itself. Null: a second kernel does (core/combine.h).
  std::uint32_t* counters;
  ErrorSlot* error;   // in the workspace header
  void* packed_mask;  // space for a packed mask, if the kernel needs one (core/packed_mask.h)

  // Options.
  const void* bias;                  // [batch, q_heads, q_len, kv_len] or null
  const std::uint8_t* mask;          // [batch, q_heads, q_len, kv_len] or null
  const float* alibi_slopes;         // [batch, q_heads] or null
  const float* sinks;                // [q_heads] or null
  const std::int32_t* cu_seqlens_q;  // [batch + 1] or null
  const std::int32_t* cu_seqlens_k;  // [batch + 1] or null
  const std::int32_t* used_k;        // [batch] or null
  const std::int32_t* q_start;       // [batch] or null
  const std::int32_t* k_start;       // [batch] or null
  Strides bias_strides, mask_strides;
  std::int64_t alibi_batch_stride, alibi_head_stride, sinks_stride;
  std::int64_t used_k_stride, q_start_stride, k_start_stride;
  Element out_element, bias_element;
  PageTable pages;  // of k and v
  Element q_element, k_element, v_element;
  Scales q_scale, k_scale, v_scale;
  BlockMask block_mask;
  FLASHCORE_HD constexpr bool has_mask() const { return mask != nullptr || block_mask.given(); }
  Fault fault;
#if defined(FLASHCORE_ASSERTS)
  char kernel[48];  // id
#endif
};

/// The sink of query head h. adds_sink: this kernel adds it, not the combine.
FLASHCORE_HD Sink sink_of(const AttentionParams& params, std::int32_t h, bool adds_sink) {
  return {params.sinks != nullptr && adds_sink, params.sinks, h, params.sinks_stride};
}

/// Rows of one split's partial result. A varlen q has total_q rows per head, for all sequences.
FLASHCORE_HD std::int64_t partial_rows(const AttentionParams& params) {
  return params.cu_seqlens_q != nullptr
             ? static_cast<std::int64_t>(params.q_heads) * params.total_q
             : static_cast<std::int64_t>(params.batch) * params.q_heads * params.q_len;
}

/// The row of query i of (batch b, query head h) in a split's partial result. q_row: first row of
/// the sequence in a varlen q; 0 if q is dense.
FLASHCORE_HD std::int64_t partial_row(const AttentionParams& params, std::int32_t b, std::int32_t h,
                                      std::int32_t q_row, std::int32_t i) {
  return params.cu_seqlens_q != nullptr
             ? static_cast<std::int64_t>(h) * params.total_q + q_row + i
             : (static_cast<std::int64_t>(b) * params.q_heads + h) * params.q_len + i;
}

}  // namespace flashcore::core
