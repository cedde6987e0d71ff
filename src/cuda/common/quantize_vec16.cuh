// 16 neighbouring elements of a row, in one thread's registers: loaded, stored, rotated, turned
// into codes and back.
#pragma once

#include <cuda_runtime.h>

#include "core/element.h"
#include "core/quantize.h"
#include "cuda/primitives/convert.cuh"

namespace flashcore::cuda {

using core::Element;
using core::QuantParams;

inline constexpr int kPiece = 16;  // elements

/// 16 wide values as they lie in memory: f32, or 16-bit of a format known at run time. (So are the
/// formats of codes: one branch for a whole piece costs nothing beside its memory, while a kernel
/// for every pair of formats takes its time to compile.)
template <bool kF32>
struct WidePiece {
  static constexpr int kLoads = kF32 ? 4 : 2;
  uint4 words[kLoads];
};

/// The address is aligned to 16 bytes.
template <bool kF32>
__device__ __forceinline__ WidePiece<kF32> load_wide(const void* g_from, std::int64_t at) {
  constexpr int kBytes = kF32 ? 4 : 2;
  const auto* g =
      reinterpret_cast<const uint4*>(static_cast<const std::uint8_t*>(g_from) + at * kBytes);
  WidePiece<kF32> piece;
#pragma unroll
  for (int i = 0; i < WidePiece<kF32>::kLoads; ++i) piece.words[i] = __ldcs(g + i);
  return piece;
}

template <bool kF32>
__device__ __forceinline__ void to_floats(float (&x)[kPiece], const WidePiece<kF32>& piece,
                                          Element wide) {
  const auto word = [&](int i) {
    const uint4& four = piece.words[i / 4];
    return i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
  };
  if constexpr (kF32) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) x[i] = __uint_as_float(word(i));
  } else if (wide == Element::f16) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const std::uint32_t bits = i % 2 == 0 ? word(i / 2) & 0xffffu : word(i / 2) >> 16;
      x[i] = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      x[i] = __uint_as_float(i % 2 == 0 ? word(i / 2) << 16 : word(i / 2) & 0xffff0000u);
    }
  }
}

template <typename T>
__device__ __forceinline__ void store_pieces(T* g_to, const float (&x)[kPiece]) {
#pragma unroll
  for (int i = 0; i < kPiece; i += 16 / sizeof(T)) {
    alignas(16) T piece[16 / sizeof(T)];
#pragma unroll
    for (int n = 0; n < static_cast<int>(16 / sizeof(T)); ++n) from_float(piece[n], x[i + n]);
    *reinterpret_cast<uint4*>(g_to + i) = *reinterpret_cast<const uint4*>(piece);
  }
}

template <bool kF32>
__device__ __forceinline__ void store_wide(void* g_to, std::int64_t at, const float (&x)[kPiece],
                                           Element wide) {
  if constexpr (kF32) {
    store_pieces(static_cast<float*>(g_to) + at, x);
  } else if (wide == Element::f16) {
    store_pieces(static_cast<__half*>(g_to) + at, x);
  } else {
    store_pieces(static_cast<__nv_bfloat16*>(g_to) + at, x);
  }
}

// ---------------------------------------------------------------------------------------------
// Codes

/// The largest magnitude as bits; those of infinities and NaN are larger than of what is finite.
__device__ __forceinline__ std::uint32_t largest_bits(const float (&x)[kPiece]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
  return largest;
}

/// The codes of 16 values, how many saturated, and the first of them that is NaN, or kPiece.
struct EncodedSpecials {
  uint4 codes;
  int saturated, first_nan;
};

/// Where something saturates or is NaN: a rolled loop, whose array therefore is in memory.
template <bool kRotate>
__device__ __forceinline__ EncodedSpecials encode_specials(const float (&x)[kPiece], float inverse,
                                                           Element code) {
  float steps[kPiece];
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    steps[i] = __fmul_rn(kRotate ? core::rotated(x[i], 1.f) : x[i], inverse);
  }
  std::uint32_t words[4] = {};
  int saturated = 0, first_nan = kPiece;
#pragma unroll 1
  for (int i = kPiece - 1; i >= 0; --i) {
    const core::Code made = core::encode(code, steps[i]);
    // The codes move up by a byte: what comes first ends as the last.
    words[3] = __funnelshift_l(words[2], words[3], 8);
    words[2] = __funnelshift_l(words[1], words[2], 8);
    words[1] = __funnelshift_l(words[0], words[1], 8);
    words[0] = words[0] << 8 | made.bits;
    saturated += made.saturated ? 1 : 0;
    if (steps[i] != steps[i]) first_nan = i;
  }
  return {make_uint4(words[0], words[1], words[2], words[3]), saturated, first_nan};
}

/// What turns signed codes into those of the byte format, four at a time, and back.
__device__ __forceinline__ std::uint32_t byte_offset(Element code) {
  return code == Element::u8 ? 0x80808080u : 0u;
}

/// Whether something saturates or is NaN.
__device__ __forceinline__ bool has_specials(const float (&x)[kPiece], float inverse,
                                             Element code) {
  // Rounding keeps the order, so the largest becomes the largest. What is not finite stays so.
  const float largest = __fmul_rn(__uint_as_float(largest_bits(x)), inverse);
  return __float_as_uint(largest) >= core::saturates_from(code);
}

/// The codes of 16 values none of which is special.
__device__ __forceinline__ uint4 encode_piece(const float (&x)[kPiece], float inverse,
                                              Element code) {
  std::uint32_t words[4];
  const auto encode = [&](auto codes_of_four) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = codes_of_four(__fmul_rn(x[4 * i], inverse), __fmul_rn(x[4 * i + 1], inverse),
                               __fmul_rn(x[4 * i + 2], inverse), __fmul_rn(x[4 * i + 3], inverse));
    }
  };
  if (code == Element::e4m3) {
    encode([](auto... steps) { return codes_of_floats<Element::e4m3>(steps...); });
  } else if (code == Element::e5m2) {
    encode([](auto... steps) { return codes_of_floats<Element::e5m2>(steps...); });
  } else {
    const std::uint32_t offset = byte_offset(code);
    encode([&](auto... steps) { return codes_of_floats<Element::int8>(steps...) ^ offset; });
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// What 16 codes stand for, in steps.
__device__ __forceinline__ void decode_piece(float (&x)[kPiece], const uint4& codes, Element code) {
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

/// What is the same for all pieces.
struct Rotation {
  std::int32_t order;
  float norm;
  __device__ explicit Rotation(std::int32_t columns)
      : order(core::rotation_order(columns)), norm(core::rotation_norm(order)) {}
};

/// The butterflies over blocks of `order` columns, which lie as pieces in neighbouring lanes.
__device__ __forceinline__ void add_butterflies(float (&x)[kPiece], std::int32_t order) {
#pragma unroll
  for (int distance = 1; distance < kPiece; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      if ((i & distance) != 0) continue;
      const float low = x[i], high = x[i + distance];
      x[i] = low + high;
      x[i + distance] = low - high;
    }
  }
  for (int lanes = 1; lanes < order / kPiece; lanes *= 2) {
    const float own_sign = (threadIdx.x & lanes) != 0 ? -1.f : 1.f;  // the upper lane subtracts
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      x[i] = fmaf(own_sign, x[i], __shfl_xor_sync(0xffffffffu, x[i], lanes));
    }
  }
}

/// Elements with the signs of their columns. Of the pairs of neighbouring ones in a column's number
/// some lie in its last four bits, which are known here, some above, and one may lie across.
__device__ __forceinline__ void set_signs(float (&x)[kPiece], std::int32_t column) {
  static_assert(kPiece == 16);
  const std::int32_t piece = column / kPiece;
  const std::uint32_t above = core::rotation_sign(piece) << 31;
  const std::uint32_t across = above ^ static_cast<std::uint32_t>(piece) << 31;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    const float signed_x = __uint_as_float(__float_as_uint(x[i]) ^ (i < 8 ? above : across));
    x[i] = core::rotation_sign(i) != 0 ? -signed_x : signed_x;
  }
}

/// All lanes of the warp call it. What is not finite need not be NaN yet: see encode_specials().
__device__ __forceinline__ void rotate_piece(const Rotation& rotation, float (&x)[kPiece],
                                             std::int32_t column) {
  set_signs(x, column);
  add_butterflies(x, rotation.order);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) x[i] = __fmul_rn(x[i], rotation.norm);
}

__device__ __forceinline__ void rotate_piece_back(const Rotation& rotation, float (&x)[kPiece],
                                                  std::int32_t column) {
  add_butterflies(x, rotation.order);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) x[i] = core::rotated(x[i], rotation.norm);
  set_signs(x, column);
}

}  // namespace flashcore::cuda
