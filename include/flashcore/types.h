// Element types, devices and strided tensor views.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "flashcore/status.h"

namespace flashcore {

enum class DType : std::int32_t {
  none = 0,
  f64,
  f32,
  f16,
  bf16,
  i32,
  boolean,
  // 8-bit types. A value is its code times a scale from a separate tensor.
  e4m3,  ///< float without infinities (OCP e4m3fn), up to 448
  e5m2,  ///< float with infinities, up to 57344
  int8,  ///< symmetric, -127 to 127; -128 is read, never written
  u8,    ///< "byte": zero point 128, (code - 128) / 127 * 448
  byte [[deprecated("use DType::u8")]] = u8,
};

FLASHCORE_API const char* to_string(DType dtype) noexcept;

/// Bytes of one element; 0 for none.
constexpr std::int64_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::f64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f16:
    case DType::bf16: return 2;
    case DType::boolean:
    case DType::e4m3:
    case DType::e5m2:
    case DType::int8:
    case DType::u8: return 1;
    case DType::none: break;
  }
  return 0;
}

/// True for the 8-bit types, whose values are codes times a scale.
constexpr bool is_8bit(DType dtype) noexcept { return dtype >= DType::e4m3; }

enum class DeviceType : std::int32_t { cpu = 0, cuda = 1 };

FLASHCORE_API const char* to_string(DeviceType type) noexcept;

struct Device {
  DeviceType type = DeviceType::cpu;
  std::int32_t index = 0;
  bool operator==(const Device&) const = default;
};

/// A strided view of memory that the caller owns. Strides count elements; rank 0: not given.
struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::none;
  Device device;
  std::int32_t rank = 0;
  std::int64_t shape[kMaxRank] = {};
  std::int64_t strides[kMaxRank] = {};

  bool given() const noexcept { return rank > 0; }
};

/// A compact row-major view. The pointer is const because inputs are never written.
inline TensorView view(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                       Device device = {}) noexcept {
  TensorView tensor;
  tensor.data = const_cast<void*>(data);
  tensor.dtype = dtype;
  tensor.device = device;
  for (const std::int64_t extent : shape) {
    if (tensor.rank == TensorView::kMaxRank) break;
    tensor.shape[tensor.rank++] = extent;
  }
  std::int64_t stride = 1;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    tensor.strides[axis] = stride;
    // make_problem() rejects shapes that are too large; here the product must not overflow.
    const std::int64_t extent = tensor.shape[axis];
    if (extent > 0 && stride > std::numeric_limits<std::int64_t>::max() / extent) {
      stride = std::numeric_limits<std::int64_t>::max();
    } else if (extent >= 0) {
      stride *= extent;
    }
  }
  return tensor;
}

/// The same memory with two axes exchanged: swap_axes(view(...), 1, 2) views
/// [batch, len, heads, dim] data as [batch, heads, len, dim].
inline TensorView swap_axes(TensorView tensor, int a, int b) noexcept {
  const std::int64_t shape = tensor.shape[a], stride = tensor.strides[a];
  tensor.shape[a] = tensor.shape[b], tensor.strides[a] = tensor.strides[b];
  tensor.shape[b] = shape, tensor.strides[b] = stride;
  return tensor;
}

}  // namespace flashcore
