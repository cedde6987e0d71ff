// One attention call with all tensors in one block of host memory. A copy of the block on any
// device is the same call, and a probe can change the inputs.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <vector>

#include "flashcore/attention.h"
#include "verify/inputs/case.h"

namespace flashcore::verify {

struct HostCall {
  std::vector<std::byte> bytes;  ///< memory of all tensors; copies rebase the views
  Tensors tensors;               ///< views into bytes
  Options options;

  HostCall() = default;
  HostCall(const HostCall& other);
  HostCall& operator=(const HostCall&) = delete;
  HostCall(HostCall&&) = default;
  HostCall& operator=(HostCall&&) = default;

  /// The same views into a copy of bytes at `base` on `device`.
  Tensors at(void* base, Device device) const;

  /// Gives one of `tensors` new compact memory of the shape, filled with poison.
  void place(TensorView Tensors::*tensor, DType dtype, const std::vector<std::int64_t>& shape);
};

HostCall random_call(const CaseSpec& spec);

/// All views of a call, outputs last.
std::vector<TensorView*> views_of(Tensors& tensors);

/// Rebases views from a block at `from` to its copy at `to` on `device`.
Tensors moved(Tensors tensors, const void* from, void* to, Device device);

/// f64 for f64 problems, else f32: the type of LSEs and of partial results.
constexpr DType wide(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

}  // namespace flashcore::verify
