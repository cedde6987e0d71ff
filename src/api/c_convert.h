// Converts descriptors and params of the C ABI to types of the C++ API.
#pragma once

#include <cstddef>
#include <cstring>

#include "core/error.h"
#include "flashcore/attention.h"
#include "flashcore/backward.h"
#include "flashcore/flashcore.h"
#include "flashcore/quant.h"

namespace flashcore {

/// The element type that an argument requires; several: the later checks decide.
enum class TypeRule { several, f32, i32, boolean, wide };

Status check_struct(const char* name, std::size_t got, std::size_t known);

/// Copies the caller's params to `to`, which contains the defaults. Fields that the caller's
/// version of the struct lacks keep their defaults. The first version ends before `cancel`.
template <typename Params>
Status copy_params(const Params* from, Params& to) {
  if (from == nullptr) return invalid_argument("params: is NULL");
  const std::size_t size = from->struct_size;
  if (size < offsetof(Params, cancel) || size > sizeof to || size % alignof(Params) != 0) {
    return check_struct("params", size, sizeof to);
  }
  std::memcpy(&to, from, size);
  return {};
}

Result<Device> device_of(const char* name, const flashcore_device& device);

/// Does not change `to` if `from` is NULL.
Status convert(const char* name, const flashcore_tensor* from, TypeRule rule, TensorView& to);

/// A converted attention call.
struct CCall {
  flashcore_params params;
  Tensors tensors;
  Options options;
};
Result<CCall> convert(const flashcore_params* params);

/// A converted call for gradients.
struct CBackwardCall {
  CCall call;
  Gradients gradients;
  bool global_lse = false;
};
Result<CBackwardCall> convert_backward(const flashcore_backward_params* params);

Status convert(const flashcore_append_params& params, AppendTensors& tensors);
Status convert(const flashcore_quant_params& params, QuantTensors& tensors);

}  // namespace flashcore
