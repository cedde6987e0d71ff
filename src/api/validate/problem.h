// Checking what a caller gives, and describing it.
#pragma once

#include "flashcore/attention.h"

namespace flashcore {

/// Shapes, types, strides and options: everything but where the tensors lie.
Result<Problem> describe(const Tensors& tensors, const Options& options) noexcept;

/// Pointers: null, misaligned, outputs overlapping themselves, each other or an input.
Status check_memory(const Tensors& tensors) noexcept;

/// That `tensors` are those `plan` was made for, up to better alignment.
Status check_against_plan(const Problem& planned, const Problem& given) noexcept;

/// merge()'s tensors.
Status check_merge(std::span<const PartialResult> parts, const TensorView& out,
                   const TensorView& lse, const TensorView& sinks) noexcept;

}  // namespace flashcore
