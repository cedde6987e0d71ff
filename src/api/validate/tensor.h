// Checks of single tensors and of their places in memory, shared by all calls. `name` is what the
// message calls the argument.
#pragma once

#include <cstdint>
#include <span>

#include "flashcore/types.h"

namespace flashcore {

bool is_float(DType dtype) noexcept;

/// Extents and strides any tensor must have.
Status check_view(const char* name, const TensorView& t) noexcept;

/// check_view() and the rank; `meaning` names the axes.
Status check_rank(const char* name, const TensorView& t, int rank, const char* meaning) noexcept;

Status check_extent(const char* name, const char* what, std::int64_t got, std::int64_t wanted,
                    const char* whose) noexcept;

/// dtype is `wanted` or `alternative` (the same twice: no alternative).
Status check_dtype(const char* name, DType got, DType wanted, DType alternative) noexcept;

Status check_device(const char* name, Device got, Device wanted) noexcept;

/// Not null and aligned to its elements, unless there are none.
Status check_pointer(const char* name, const TensorView& t) noexcept;

struct NamedView {
  const char* name;
  const TensorView* view;
};

/// Outputs must not overlap themselves, each other or any input.
Status check_outputs(std::span<const NamedView> outputs,
                     std::span<const NamedView> inputs) noexcept;

}  // namespace flashcore
