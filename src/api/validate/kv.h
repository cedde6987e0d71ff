// Layouts of strided tensors, and K and V in all their layouts.
#pragma once

#include "flashcore/problem.h"

namespace flashcore {

/// The axes that hold batch, head, row and column; -1: no such axis.
struct Axes {
  int batch, head, row, column;
};

Layout layout_of(const TensorView& t, const Axes& axes) noexcept;

/// How K and V are addressed.
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

/// Checks shapes and strides of k, v and block_table against each other and against `batch`, the
/// batch size of the tensor `whose`. The caller compares types and devices.
Status parse_kv(const TensorView& k, const TensorView& v, const TensorView& block_table,
                KvLayout layout, std::int64_t batch, const char* whose, KvShape& shape) noexcept;

}  // namespace flashcore
