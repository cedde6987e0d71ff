// Checks of single tensors and of memory overlap, shared by all calls. `name` is the argument's
// name in messages.
#pragma once

#include <cstdint>
#include <span>

#include "flashcore/types.h"

namespace flashcore {

bool is_float(DType dtype) noexcept;

/// Checks extents and strides.
Status check_view(const char* name, const TensorView& t) noexcept;

/// check_view() and a check of the rank; `meaning` names the axes.
Status check_rank(const char* name, const TensorView& t, int rank, const char* meaning) noexcept;

// The messages of the checks below, which are inline: run() makes about thirty of them.
Status extent_error(const char* name, const char* what, std::int64_t got, std::int64_t wanted,
                    const char* whose) noexcept;
Status dtype_error(const char* name, DType got, DType wanted, DType alternative) noexcept;
Status device_error(const char* name, Device got, Device wanted) noexcept;
/// OK if the tensor has no elements.
Status pointer_error(const char* name, const TensorView& t) noexcept;

inline Status check_extent(const char* name, const char* what, std::int64_t got,
                           std::int64_t wanted, const char* whose) noexcept {
  return got == wanted ? Status() : extent_error(name, what, got, wanted, whose);
}

/// Checks that the dtype is `wanted` or `alternative`; pass `wanted` twice if there is only one.
inline Status check_dtype(const char* name, DType got, DType wanted, DType alternative) noexcept {
  if (got == wanted || got == alternative) return {};
  return dtype_error(name, got, wanted, alternative);
}

inline Status check_device(const char* name, Device got, Device wanted) noexcept {
  return got == wanted ? Status() : device_error(name, got, wanted);
}

/// Checks that the pointer is not null and is aligned to the elements, if there are any.
inline Status check_pointer(const char* name, const TensorView& t) noexcept {
  const auto size = static_cast<std::uintptr_t>(size_of(t.dtype));  // a power of two
  const bool aligned = (reinterpret_cast<std::uintptr_t>(t.data) & (size - 1)) == 0;
  return t.data != nullptr && aligned ? Status() : pointer_error(name, t);
}

struct NamedView {
  const char* name;
  const TensorView* view;
};

/// Checks that outputs do not overlap themselves, each other or any input.
Status check_outputs(std::span<const NamedView> outputs,
                     std::span<const NamedView> inputs) noexcept;

}  // namespace flashcore
