// Vectors of 16 adjacent elements of a row, in the registers of one thread: loads, stores, 8-bit
// encoding and decoding, rotation.
#pragma once

#include <cuda_runtime.h>

#include "core/element.h"
#include "core/quantize.h"
#include "cuda/primitives/convert.cuh"

namespace flashcore::cuda {

using core::Element;
using core::QuantParams;

inline constexpr int kVec = 16;  // elements of a vector

/// The bits of 16 wide values: f32, or a 16-bit format known at run time. The 8-bit format is a
/// runtime value too: one branch per vector is free next to its memory access, while a kernel for
/// every pair of formats costs compile time.
template <bool kF32>
struct WideVec {
  static constexpr int kLoads = kF32 ? 4 : 2;
  uint4 words[kLoads];
};

/// Loads 16 wide values. The address is 16-byte aligned.
template <bool kF32>
__device__ __forceinline__ WideVec<kF32> load_wide(const void* g_from, std::int64_t at) {
  constexpr int kBytes = kF32 ? 4 : 2;
  const auto* g =
      reinterpret_cast<const uint4*>(static_cast<const std::uint8_t*>(g_from) + at * kBytes);
  WideVec<kF32> vec;
#pragma unroll
  for (int i = 0; i < WideVec<kF32>::kLoads; ++i) vec.words[i] = __ldcs(g + i);
  return vec;
}

template <bool kF32>
__device__ __forceinline__ void to_floats(float (&x)[kVec], const WideVec<kF32>& vec,
                                          Element wide) {
  const auto word = [&](int i) {
    const uint4& four = vec.words[i / 4];
    return i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
  };
  if constexpr (kF32) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[i] = __uint_as_float(word(i));
  } else if (wide == Element::f16) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const std::uint32_t bits = i % 2 == 0 ? word(i / 2) & 0xffffu : word(i / 2) >> 16;
      x[i] = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      x[i] = __uint_as_float(i % 2 == 0 ? word(i / 2) << 16 : word(i / 2) & 0xffff0000u);
    }
  }
}

template <typename T>
__device__ __forceinline__ void store_vecs(T* g_to, const float (&x)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; i += 16 / sizeof(T)) {
    alignas(16) T vec[16 / sizeof(T)];
#pragma unroll
    for (int n = 0; n < static_cast<int>(16 / sizeof(T)); ++n) from_float(vec[n], x[i + n]);
    *reinterpret_cast<uint4*>(g_to + i) = *reinterpret_cast<const uint4*>(vec);
  }
}

template <bool kF32>
__device__ __forceinline__ void store_wide(void* g_to, std::int64_t at, const float (&x)[kVec],
                                           Element wide) {
  if constexpr (kF32) {
    store_vecs(static_cast<float*>(g_to) + at, x);
  } else if (wide == Element::f16) {
    store_vecs(static_cast<__half*>(g_to) + at, x);
  } else {
    store_vecs(static_cast<__nv_bfloat16*>(g_to) + at, x);
  }
}

// ---------------------------------------------------------------------------------------------
// Encoding and decoding

/// The bits of the largest magnitude. Infinities and NaN have larger bits than all finite values.
__device__ __forceinline__ std::uint32_t largest_bits(const float (&x)[kVec]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kVec; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
  return largest;
}

/// 16 encoded values, the number that saturated, and the index of the first NaN, or kVec.
struct EncodedSpecials {
  uint4 codes;
  int saturated, first_nan;
};

/// Encodes 16 values, some of which saturate or are NaN. The loop is rolled, so its array is in
/// local memory.
template <bool kRotate>
__device__ __forceinline__ EncodedSpecials encode_specials(const float (&x)[kVec], float inverse,
                                                           Element code) {
  float steps[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    steps[i] = __fmul_rn(kRotate ? core::rotated(x[i], 1.f) : x[i], inverse);
  }
  std::uint32_t words[4] = {};
  int saturated = 0, first_nan = kVec;
#pragma unroll 1
  for (int i = kVec - 1; i >= 0; --i) {
    const core::Code made = core::encode(code, steps[i]);
    // Shift all bytes up by one. The loop runs backwards, so value 0 ends in the lowest byte.
    words[3] = __funnelshift_l(words[2], words[3], 8);
    words[2] = __funnelshift_l(words[1], words[2], 8);
    words[1] = __funnelshift_l(words[0], words[1], 8);
    words[0] = words[0] << 8 | made.bits;
    saturated += made.saturated ? 1 : 0;
    if (steps[i] != steps[i]) first_nan = i;
  }
  return {make_uint4(words[0], words[1], words[2], words[3]), saturated, first_nan};
}

/// The XOR mask between int8 and u8 (zero point 128), four values at a time.
__device__ __forceinline__ std::uint32_t byte_offset(Element code) {
  return code == Element::u8 ? 0x80808080u : 0u;
}

/// True if any value saturates or is NaN.
__device__ __forceinline__ bool has_specials(const float (&x)[kVec], float inverse, Element code) {
  // Rounding is monotonic: the largest magnitude stays the largest. Infinities and NaN stay
  // non-finite.
  const float largest = __fmul_rn(__uint_as_float(largest_bits(x)), inverse);
  return __float_as_uint(largest) >= core::saturates_from(code);
}

/// Encodes 16 values. None of them saturates or is NaN.
__device__ __forceinline__ uint4 encode_vec(const float (&x)[kVec], float inverse, Element code) {
  std::uint32_t words[4];
  const auto encode = [&](auto codes_of_four) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = codes_of_four(__fmul_rn(x[4 * i], inverse), __fmul_rn(x[4 * i + 1], inverse),
                               __fmul_rn(x[4 * i + 2], inverse), __fmul_rn(x[4 * i + 3], inverse));
    }
  };
  if (code == Element::e4m3) {
    encode([](auto... steps) { return encode_8bit_x4<Element::e4m3>(steps...); });
  } else if (code == Element::e5m2) {
    encode([](auto... steps) { return encode_8bit_x4<Element::e5m2>(steps...); });
  } else {
    const std::uint32_t offset = byte_offset(code);
    encode([&](auto... steps) { return encode_8bit_x4<Element::int8>(steps...) ^ offset; });
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// Decodes 16 values, without their scale.
__device__ __forceinline__ void decode_vec(float (&x)[kVec], const uint4& codes, Element code) {
  const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  const auto decode = [&](Element element, std::uint32_t offset) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = decode_8bit_x4(element, words[i] ^ offset);
      x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
    }
  };
  if (code == Element::e4m3) {
    decode(Element::e4m3, 0);
  } else if (code == Element::e5m2) {
    decode(Element::e5m2, 0);
  } else {
    decode(Element::int8, byte_offset(code));
  }
}

// ---------------------------------------------------------------------------------------------
// Rotation (core/rotation.h)

/// The constants of a rotation.
struct Rotation {
  std::int32_t order;
  float norm;
  __device__ explicit Rotation(std::int32_t columns)
      : order(core::rotation_order(columns)), norm(core::rotation_norm(order)) {}
};

/// The butterflies over blocks of `order` columns. Adjacent lanes hold adjacent vectors of a block.
__device__ __forceinline__ void add_butterflies(float (&x)[kVec], std::int32_t order) {
#pragma unroll
  for (int distance = 1; distance < kVec; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if ((i & distance) != 0) continue;
      const float low = x[i], high = x[i + distance];
      x[i] = low + high;
      x[i + distance] = low - high;
    }
  }
  for (int lanes = 1; lanes < order / kVec; lanes *= 2) {
    const float own_sign = (threadIdx.x & lanes) != 0 ? -1.f : 1.f;  // the upper lane subtracts
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      x[i] = fmaf(own_sign, x[i], __shfl_xor_sync(0xffffffffu, x[i], lanes));
    }
  }
}

/// Multiplies the elements by the signs of their columns. A sign is the parity of the adjacent
/// 1-bit pairs in the column's number: pairs in its low four bits (compile-time constants), pairs
/// above them, and the pair of bits 3 and 4.
__device__ __forceinline__ void set_signs(float (&x)[kVec], std::int32_t column) {
  static_assert(kVec == 16);
  const std::int32_t vec = column / kVec;
  const std::uint32_t above = core::rotation_sign(vec) << 31;
  const std::uint32_t across = above ^ static_cast<std::uint32_t>(vec) << 31;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float signed_x = __uint_as_float(__float_as_uint(x[i]) ^ (i < 8 ? above : across));
    x[i] = core::rotation_sign(i) != 0 ? -signed_x : signed_x;
  }
}

/// All lanes of the warp call this function. Non-finite results may still be infinities:
/// encode_specials() turns them into NaN.
__device__ __forceinline__ void rotate_vec(const Rotation& rotation, float (&x)[kVec],
                                           std::int32_t column) {
  set_signs(x, column);
  add_butterflies(x, rotation.order);
#pragma unroll
  for (int i = 0; i < kVec; ++i) x[i] = __fmul_rn(x[i], rotation.norm);
}

__device__ __forceinline__ void rotate_piece_back(const Rotation& rotation, float (&x)[kVec],
                                                  std::int32_t column) {
  add_butterflies(x, rotation.order);
#pragma unroll
  for (int i = 0; i < kVec; ++i) x[i] = core::rotated(x[i], rotation.norm);
  set_signs(x, column);
}

}  // namespace flashcore::cuda
