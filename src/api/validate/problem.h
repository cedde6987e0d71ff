// Validation of attention calls, and their description as a Problem.
#pragma once

#include "flashcore/attention.h"

namespace flashcore {

/// Checks shapes, types, strides and options, but no pointers. Fills in an empty Problem, which is
/// too large to return by value in every run().
Status describe(const Tensors& tensors, const Options& options, Problem& problem) noexcept;

/// Checks pointers: null, misaligned, outputs that overlap themselves, each other or an input.
Status check_memory(const Tensors& tensors) noexcept;

/// Checks that the given problem equals the planned one. Better alignment is valid.
Status check_against_plan(const Problem& planned, const Problem& given) noexcept;

/// Checks the tensors of merge().
Status check_merge(std::span<const PartialResult> parts, const TensorView& out,
                   const TensorView& lse, const TensorView& sinks) noexcept;

}  // namespace flashcore
