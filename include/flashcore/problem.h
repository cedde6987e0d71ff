// A Problem: everything about one attention call except the pointers. docs/options.md lists all
// options, docs/numerics.md defines them exactly.
#pragma once

#include <cstdint>
#include <optional>

#include "flashcore/types.h"

namespace flashcore {

enum class Reproducibility : std::int32_t {
  /// Same call, build, GPU model and SM count: same bits.
  deterministic = 0,
  /// The bits of a row depend only on its own data, not on batch, padding or chunking.
  batch_invariant = 1,
};

struct Options {
  bool causal = false;
  std::int64_t window_left = -1;   ///< visible keys left of the query's position; -1: all
  std::int64_t window_right = -1;  ///< visible keys right of it; -1: all
  std::optional<double> scale{};   ///< default 1 / sqrt(head_dim); at most 1e30 (f64: any finite)
  double softcap = 0.0;  ///< c > 0: scores become c * tanh(score / c); a large c has no effect
  bool partial = false;  ///< f32 out and LSE without sinks, for merge()
  bool checked = false;  ///< workspace_status() reports invalid lengths, positions and page ids
  std::int64_t max_q_len = 0;   ///< with cu_seqlens_q: the longest sequence; 0: total_q
  std::int64_t max_kv_len = 0;  ///< with cu_seqlens_k: the longest sequence; 0: total_k
  std::int32_t num_splits = 0;  ///< KV splits; 0: the planner chooses
  Reproducibility reproducibility = Reproducibility::deterministic;
  const char* kernel = nullptr;     ///< run exactly this kernel (its id), or fail
  std::int64_t q_scale_block = 0;   ///< rows per scale, if q_scale has blocks
  std::int64_t kv_scale_block = 0;  ///< keys per scale, if k_scale or v_scale has blocks

  bool operator==(const Options&) const = default;
};

/// The tensors of one call. q, k, v and out are required, the others optional. k and v have q's
/// type or an 8-bit type. An 8-bit q requires 8-bit k and v, and out in f16, bf16 or f32.
///
/// Dense: q [batch, q_heads, q_len, head_dim], k [batch, kv_heads, kv_len, head_dim],
/// v [batch, kv_heads, kv_len, v_dim], out [batch, q_heads, q_len, v_dim],
/// lse [batch, q_heads, q_len].
/// Varlen queries (cu_seqlens_q): q [total_q, q_heads, head_dim], out [total_q, q_heads, v_dim],
/// lse [q_heads, total_q]. Varlen keys (cu_seqlens_k): k and v [total_k, kv_heads, dim].
/// Paged KV (block_table): k [pages, page_size, kv_heads, head_dim], v likewise. Key j of sequence
/// b is row j % page_size of page block_table[b, j / page_size]; kv_len is max_pages * page_size.
struct Tensors {
  TensorView q{}, k{}, v{}, out{};
  TensorView lse{};           ///< f32 (f64 for f64 problems), natural logarithm
  TensorView bias{};          ///< added to the scores: [batch|1, q_heads|1, q_len|1, kv_len]
  TensorView mask{};          ///< boolean, false hides the key: same shape as bias
  TensorView alibi_slopes{};  ///< f32 [q_heads] or [batch, q_heads]
  TensorView sinks{};         ///< f32 [q_heads]
  TensorView cu_seqlens_q{};  ///< i32 [batch + 1], from 0 to total_q, never decreasing
  TensorView cu_seqlens_k{};  ///< i32 [batch + 1]
  TensorView seqused_k{};     ///< i32 [batch]: keys in use, at most kv_len
  TensorView block_table{};   ///< i32 [batch, max_pages]: page ids; sequences may share pages
  TensorView q_start{};       ///< i32 [batch]: position of query 0; default kv_len_b - q_len_b
  TensorView k_start{};       ///< i32 [batch]: position of key 0; default 0
  /// f32 [1], [batch, heads] or [batch, heads, blocks], for 8-bit tensors only; default 1. Row i of
  /// a sequence is in block i / Options::q_scale_block, key j in block j / Options::kv_scale_block,
  /// also if k and v are paged.
  TensorView q_scale{}, k_scale{}, v_scale{};
  /// A mask by blocks (flashcore/block_mask.h), instead of mask. block_q and block_k are powers of
  /// two. i32 [batch|1, q_heads|1, ceil(q_len / block_q), ceil(kv_len / block_k)]: 0 hides the
  /// block, 1 shows it, 2 + n takes tile n of mask_bits. Other values hide it.
  TensorView mask_blocks{};
  /// i32 [tiles, block_q, block_k / 32], compact: bit j of word w of a row is key 32 w + j of the
  /// block. Its shape defines the block size, so it is given even if there are no tiles.
  TensorView mask_bits{};
};

/// The memory layout of an operand. Strides count elements; 0 repeats (inputs only).
struct Layout {
  DType dtype = DType::none;         ///< none: not given
  std::int32_t alignment_bytes = 0;  ///< largest power of two (up to 128) dividing every row start
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t row = 0;
  std::int64_t column = 0;

  bool given() const noexcept { return dtype != DType::none; }
  /// Without branches: run() compares every layout with the plan's, and they are usually equal.
  constexpr bool operator==(const Layout& other) const noexcept {
    const std::int64_t strides =
        (batch ^ other.batch) | (head ^ other.head) | (row ^ other.row) | (column ^ other.column);
    return (strides == 0) & (dtype == other.dtype) & (alignment_bytes == other.alignment_bytes);
  }
};

struct Problem {
  Device device;
  /// The type that the kernel computes with: q's; for an 8-bit q bf16 if out is bf16, else f16.
  /// The layouts below have the stored types.
  DType dtype = DType::none;
  std::int64_t batch = 0;
  std::int64_t q_heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t q_len = 0;   ///< capacity: at least the longest sequence
  std::int64_t kv_len = 0;  ///< capacity
  std::int64_t head_dim = 0;
  std::int64_t v_dim = 0;
  std::int64_t total_q = 0;  ///< rows of a varlen q; 0 if q is dense
  std::int64_t total_k = 0;
  bool q_varlen = false;
  bool kv_varlen = false;
  std::int64_t page_size = 0;  ///< keys per page; 0: k and v are not paged
  std::int64_t pages = 0;      ///< number of pages; k.batch and v.batch are the page strides
  Layout q, k, v, out, lse, bias, mask, alibi_slopes, sinks;
  Layout seqused_k, q_start, k_start, block_table;  ///< only .batch is meaningful
  Layout q_scale, k_scale, v_scale;                 ///< .row is the block stride
  Layout mask_blocks, mask_bits;                    ///< mask_bits: strides are 0
  std::int64_t mask_block_q = 0;                    ///< queries per block of mask_blocks
  std::int64_t mask_block_k = 0;                    ///< keys per block
  Options options;
  double scale = 0.0;  ///< resolved: options.scale or 1 / sqrt(head_dim)

  bool operator==(const Problem&) const = default;
};

/// Validates the tensors and options of a call. Reads no tensor data.
FLASHCORE_API Result<Problem> make_problem(const Tensors& tensors, const Options& options) noexcept;

/// The problem of compact [batch, heads, len, dim] tensors, for planning before they exist.
FLASHCORE_API Result<Problem> dense_problem(DType dtype, std::int64_t batch, std::int64_t q_heads,
                                            std::int64_t kv_heads, std::int64_t q_len,
                                            std::int64_t kv_len, std::int64_t head_dim,
                                            std::int64_t v_dim, const Options& options = {},
                                            Device device = {}) noexcept;

}  // namespace flashcore
