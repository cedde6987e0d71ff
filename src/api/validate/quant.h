// Element types of q, k and v, and the scales of 8-bit tensors.
#pragma once

#include "flashcore/problem.h"

namespace flashcore {

/// Checks the types of q and out and sets Problem::dtype.
Status describe_storage(const Tensors& tensors, Problem& problem) noexcept;

/// Checks the types of k and v and the shapes of q_scale, k_scale and v_scale.
Status find_scales(const Tensors& tensors, Problem& problem) noexcept;

/// The layout of a scale tensor: f32 [1], [batch, heads] or, with `block_rows` rows per scale,
/// [batch, heads, blocks]. `block_option` is the name of block_rows in messages.
Status describe_scale(const char* name, const TensorView& scale, std::int64_t batch,
                      std::int64_t heads, std::int64_t rows, std::int64_t block_rows,
                      const char* block_option, Layout& layout) noexcept;

}  // namespace flashcore
