// Layouts of strided tensors, and checks of K and V in all their layouts.
#pragma once

#include "flashcore/problem.h"

namespace flashcore {

/// Indices of the batch, head, row and column axes; -1: the tensor has no such axis.
struct Axes {
  int batch, head, row, column;
};

Layout layout_of(const TensorView& t, const Axes& axes) noexcept;

/// Layout of K and V.
enum class KvLayout {
  dense,   // [batch, kv_heads, kv_len, dim]
  varlen,  // [total_k, kv_heads, dim], cu_seqlens_k
  paged,   // [pages, page_size, kv_heads, dim], block_table
};

struct KvShape {
  std::int64_t kv_heads = 0;
  std::int64_t kv_len = 0;  ///< capacity of a sequence
  std::int64_t head_dim = 0, v_dim = 0;
  std::int64_t total_k = 0;               ///< varlen
  std::int64_t page_size = 0, pages = 0;  ///< paged
  Layout k, v, block_table;
};

/// Checks shapes and strides of k, v and block_table against each other and against `batch`.
/// Messages name `batch_of` as the tensor that has this batch. The caller checks types and devices.
Status parse_kv(const TensorView& k, const TensorView& v, const TensorView& block_table,
                KvLayout layout, std::int64_t batch, const char* batch_of, KvShape& shape) noexcept;

}  // namespace flashcore
