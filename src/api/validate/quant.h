// The types q, k and v may be stored in, and the scales of the 8-bit ones.
#pragma once

#include "flashcore/problem.h"

namespace flashcore {

/// Which of q, k, v and out may have which type, together. Sets Problem::dtype.
Status describe_storage(const Tensors& tensors, Problem& problem) noexcept;

/// q_scale, k_scale and v_scale against the problem's sizes.
Status find_scales(const Tensors& tensors, Problem& problem) noexcept;

/// The places of one scale tensor: f32 [1], [batch, heads] or, with `block_rows` rows to a scale,
/// [batch, heads, blocks]. `block_option` is what the caller calls block_rows.
Status describe_scale(const char* name, const TensorView& scale, std::int64_t batch,
                      std::int64_t heads, std::int64_t rows, std::int64_t block_rows,
                      const char* block_option, Layout& layout) noexcept;

}  // namespace flashcore
