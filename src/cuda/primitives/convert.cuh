// Conversions between f32 and the 16-bit and 8-bit formats, and vec4 loads and stores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/quant_formats.h"

namespace flashcore::cuda {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ void from_float(float& to, float x) { to = x; }
__device__ __forceinline__ void from_float(__half& to, float x) { to = __float2half_rn(x); }
__device__ __forceinline__ void from_float(__nv_bfloat16& to, float x) {
  to = __float2bfloat16_rn(x);
}

/// Packs two floats as 16-bit elements into one register, `low` in the lower half.
template <typename T>
__device__ __forceinline__ std::uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ std::uint32_t pack<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(both);
}

template <>
__device__ __forceinline__ std::uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(both);
}

/// Decodes an 8-bit value, without its scale (core/quant_formats.h). Goes through f16: e5m2 has the
/// same exponent range, and e4m3's differs by a factor of 2^8.
__device__ __forceinline__ float decode_8bit(core::Element element, std::uint32_t code) {
  if (element == core::Element::int8) return static_cast<float>(static_cast<std::int8_t>(code));
  if (element == core::Element::u8) return static_cast<float>(static_cast<int>(code) - 128);
  if (element == core::Element::e5m2) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(code << 8)));
  }
  const std::uint32_t magnitude = code & 0x7fu;
  const auto bits = static_cast<unsigned short>((code & 0x80u) << 8 | magnitude << 7);
  const float value = __half2float(__ushort_as_half(bits)) * 256.f;
  return magnitude == 0x7fu ? __int_as_float(0x7fffffff) : value;
}

/// Decodes four 8-bit values, lowest byte first.
__device__ __forceinline__ float4 decode_8bit_x4(core::Element element, std::uint32_t codes) {
  return make_float4(decode_8bit(element, codes & 0xffu), decode_8bit(element, codes >> 8 & 0xffu),
                     decode_8bit(element, codes >> 16 & 0xffu), decode_8bit(element, codes >> 24));
}

/// Rounds four values, already divided by their scale, to the 8-bit format, lowest byte first.
/// Requires magnitudes below core::saturates_from() (finite, no saturation); the result then equals
/// core::encode(). For u8, callers flip the sign bit of the int8 result.
template <core::Element kCode>
__device__ __forceinline__ std::uint32_t encode_8bit_x4(float x0, float x1, float x2, float x3) {
  static_assert(kCode != core::Element::u8);
  if constexpr (kCode == core::Element::int8) {
    // At 1.5 * 2^23 a float's ulp is 1: the addition rounds to an integer in the low mantissa bits.
    const auto integer = [](float x) { return __float_as_uint(__fadd_rn(x, 12582912.f)); };
    const std::uint32_t low = __byte_perm(integer(x0), integer(x1), 0x0040);
    const std::uint32_t high = __byte_perm(integer(x2), integer(x3), 0x0040);
    return __byte_perm(low, high, 0x5410);
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    std::uint16_t low, high;
    if constexpr (kCode == core::Element::e4m3) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x1), "f"(x0));
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x3), "f"(x2));
    } else {
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x1), "f"(x0));
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x3), "f"(x2));
    }
    return static_cast<std::uint32_t>(high) << 16 | low;
#else
    const auto code = [](float x) {
      return static_cast<std::uint32_t>(core::encode(kCode, x).bits);
    };
    return code(x0) | code(x1) << 8 | code(x2) << 16 | code(x3) << 24;
#endif
  }
}

/// Four adjacent elements, aligned to their size: loaded or stored as one vector.
template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T x[4];
};

template <typename T>
__device__ __forceinline__ float4 to_floats(const Four<T>& four) {
  return make_float4(to_float(four.x[0]), to_float(four.x[1]), to_float(four.x[2]),
                     to_float(four.x[3]));
}

/// Converts a vec4 loaded as raw bits. T selects f16 or bf16 after the load.
template <typename T>
__device__ __forceinline__ float4 bits_to_floats(const Four<std::uint16_t>& bits) {
  return to_floats(reinterpret_cast<const Four<T>&>(bits));
}

/// One load: copying __half or __nv_bfloat16 elements would make four.
template <typename T>
__device__ __forceinline__ float4 load_four(const T* g_from) {
  if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const float4*>(g_from);
  } else {
    const uint2 bits = *reinterpret_cast<const uint2*>(g_from);
    return bits_to_floats<T>(reinterpret_cast<const Four<std::uint16_t>&>(bits));
  }
}

template <typename T>
__device__ __forceinline__ void store_four(T* g_to, float4 value) {
  Four<T> four;
  from_float(four.x[0], value.x);
  from_float(four.x[1], value.y);
  from_float(four.x[2], value.z);
  from_float(four.x[3], value.w);
  *reinterpret_cast<Four<T>*>(g_to) = four;
}

/// Loads up to four columns, `left` of which exist, of a row that need not be aligned; the others
/// are 0. Bypasses L1.
__device__ __forceinline__ float4 load_columns(const float* g_from, int left) {
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = i < left ? __ldcg(g_from + i) : 0.f;
  return make_float4(x[0], x[1], x[2], x[3]);
}

/// Stores four columns of a row, fewer at the right edge.
template <typename T>
__device__ __forceinline__ void store_columns(T* g_row, std::int64_t column_stride, int column,
                                              int columns, const float (&x)[4], bool vector_rows) {
  if (vector_rows) {
    store_four(g_row + column, make_float4(x[0], x[1], x[2], x[3]));
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column + i < columns) from_float(g_row[(column + i) * column_stride], x[i]);
  }
}

/// The same for a runtime format: f32, f16 or bf16. The row starts at element `first`.
__device__ __forceinline__ void store_columns(void* g_data, core::Element element,
                                              std::int64_t first, std::int64_t column_stride,
                                              int column, int columns, const float (&x)[4],
                                              bool vector_rows) {
  if (element == core::Element::f32) {
    store_columns(static_cast<float*>(g_data) + first, column_stride, column, columns, x,
                  vector_rows);
  } else if (element == core::Element::f16) {
    store_columns(static_cast<__half*>(g_data) + first, column_stride, column, columns, x,
                  vector_rows);
  } else {
    store_columns(static_cast<__nv_bfloat16*>(g_data) + first, column_stride, column, columns, x,
                  vector_rows);
  }
}

}  // namespace flashcore::cuda
