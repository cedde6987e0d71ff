// Quantising and dequantising: core/quantize.h says what shares a scale, this streams through it.
//
//   grid      a few blocks per SM; a block takes one unit (rows of one head with one scale) after
//             another
//   threads   pieces of 16 elements: 16 bytes of codes, 32 or 64 of wide values, all loads first;
//   or
//             single elements where rows are no whole pieces
//   passes    where scales are to be found: clear, largest magnitude (an atomic maximum per unit,
//   of
//             floats >= 0 as integers: the order does not matter), scale from it, codes
//   rotation  in registers and between lanes, in each pass that reads values; in shared memory
//   where
//             rows are no whole pieces
#include <cuda_runtime.h>

#include "core/element.h"
#include "core/quantize.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/primitives/report.cuh"
#include "cuda/registry.h"

namespace flashcore::cuda {
namespace {

using core::Element;
using core::QuantParams;
using core::QuantUnit;

constexpr int kPiece = 16;  // elements
constexpr int kWarps = kQuantThreads / 32;

// ---------------------------------------------------------------------------------------------
// Pieces

/// 16 wide values. The address is aligned to 16 bytes.
__device__ __forceinline__ void load_wide(float (&x)[kPiece], const void* g_from, Element wide,
                                          std::int64_t at) {
  if (wide == Element::f32) {
    const float4* g = reinterpret_cast<const float4*>(static_cast<const float*>(g_from) + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = __ldcs(g + i);
      x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
    }
    return;
  }
  const uint4* g = reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(g_from) + at);
  const uint4 low = __ldcs(g), high = __ldcs(g + 1);
  const std::uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (wide == Element::f16) {
      x[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] & 0xffffu)));
      x[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] >> 16)));
    } else {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
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

__device__ __forceinline__ void store_wide(void* g_to, Element wide, std::int64_t at,
                                           const float (&x)[kPiece]) {
  if (wide == Element::f32) {
    store_pieces(static_cast<float*>(g_to) + at, x);
  } else if (wide == Element::f16) {
    store_pieces(static_cast<__half*>(g_to) + at, x);
  } else {
    store_pieces(static_cast<__nv_bfloat16*>(g_to) + at, x);
  }
}

__device__ __forceinline__ bool is_nan(float x) { return x != x; }

/// The codes of 16 values, how many saturated, and the first of them that is NaN, or kPiece.
struct Encoded {
  uint4 codes;
  int saturated, first_nan;
};
template <Element kCode>
__device__ __forceinline__ Encoded encode_piece(const float (&x)[kPiece], float inverse) {
  float steps[kPiece];
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    steps[i] = __fmul_rn(x[i], inverse);
    largest = max(largest, __float_as_uint(steps[i]) & 0x7fffffffu);
  }
  std::uint32_t words[4] = {};
  if (largest < core::saturates_from(kCode)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = codes_of_floats<kCode>(steps[4 * i], steps[4 * i + 1], steps[4 * i + 2],
                                        steps[4 * i + 3]);
    }
    return {make_uint4(words[0], words[1], words[2], words[3]), 0, kPiece};
  }
  int saturated = 0, first_nan = kPiece;
#pragma unroll
  for (int i = kPiece - 1; i >= 0; --i) {
    const core::Code code = core::code_of(kCode, steps[i]);
    words[i / 4] |= static_cast<std::uint32_t>(code.bits) << (8 * (i % 4));
    saturated += code.saturated ? 1 : 0;
    if (is_nan(steps[i])) first_nan = i;
  }
  return {make_uint4(words[0], words[1], words[2], words[3]), saturated, first_nan};
}

// ---------------------------------------------------------------------------------------------
// Units

template <typename Body>
__device__ __forceinline__ void for_each_unit(const QuantParams& p, Body body) {
  const std::int64_t units = core::quant_units(p);
  for (std::int64_t i = blockIdx.x; i < units; i += gridDim.x) body(core::quant_unit(p, i));
}

/// Where an element or the first one of a piece lies.
struct At {
  std::int64_t from, to;     // offsets
  std::int32_t row, column;  // of the unit
};

/// visit(at, whether there is such a piece) in every thread of the block equally often, so that
/// warps can exchange values. The pieces of a block of columns that are rotated together lie in
/// neighbouring lanes of one warp: rows and blocks are shared out in whole powers of two.
template <typename Visit>
__device__ __forceinline__ void for_each_piece(const QuantParams& p, const QuantUnit& unit,
                                               Visit visit) {
  const auto per_row = static_cast<std::uint32_t>(p.columns / kPiece);
  const std::int64_t from = core::offset_of(p.from_strides, unit.b, unit.h, unit.first_row);
  const std::int64_t to = core::offset_of(p.to_strides, unit.b, unit.h, unit.first_row);
  const std::int64_t pieces = static_cast<std::int64_t>(unit.rows) * per_row;
  // The place is stepped forward: a division for every piece would take longer than its memory.
  const std::uint32_t more_rows = kQuantThreads / per_row, more_pieces = kQuantThreads % per_row;
  std::uint32_t row = threadIdx.x / per_row, piece = threadIdx.x % per_row;
#pragma unroll 2
  for (std::int64_t first = 0; first < pieces; first += kQuantThreads) {
    const auto column = static_cast<std::int32_t>(piece * kPiece);
    visit(At{from + row * p.from_strides.row + column, to + row * p.to_strides.row + column,
             static_cast<std::int32_t>(row), column},
          row < static_cast<std::uint32_t>(unit.rows));
    row += more_rows;
    piece += more_pieces;
    if (piece >= per_row) piece -= per_row, ++row;
  }
}

/// visit(at) for each of the unit's elements, shared out over the block's threads.
template <typename Visit>
__device__ __forceinline__ void for_each_element(const QuantParams& p, const QuantUnit& unit,
                                                 Visit visit) {
  const std::int64_t from = core::offset_of(p.from_strides, unit.b, unit.h, unit.first_row);
  const std::int64_t to = core::offset_of(p.to_strides, unit.b, unit.h, unit.first_row);
  const std::int64_t elements = static_cast<std::int64_t>(unit.rows) * p.columns;
  for (std::int64_t i = threadIdx.x; i < elements; i += kQuantThreads) {
    const auto row = static_cast<std::int32_t>(i / p.columns);
    const auto column = static_cast<std::int32_t>(i % p.columns);
    visit(At{from + row * p.from_strides.row + column * p.from_strides.column,
             to + row * p.to_strides.row + column * p.to_strides.column, row, column});
  }
}

// ---------------------------------------------------------------------------------------------
// Rotation (core/rotation.h)

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

/// All lanes of the warp call it.
__device__ __forceinline__ void rotate_piece(const QuantParams& p, float (&x)[kPiece],
                                             std::int32_t column) {
  const std::int32_t order = core::rotation_order(p.columns);
  const float norm = core::rotation_norm(order);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) x[i] = core::with_rotation_sign(x[i], column + i);
  add_butterflies(x, order);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) x[i] = core::rotated(x[i], norm);
}

__device__ __forceinline__ void rotate_piece_back(const QuantParams& p, float (&x)[kPiece],
                                                  std::int32_t column) {
  const std::int32_t order = core::rotation_order(p.columns);
  const float norm = core::rotation_norm(order);
  add_butterflies(x, order);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    x[i] = core::with_rotation_sign(core::rotated(x[i], norm), column + i);
  }
}

/// Memory for a row, one per warp. (Not in a template, each instance of which would have its own.)
__device__ __forceinline__ float* shared_row() {
  __shared__ float s_rows[kWarps][core::kMaxRotatedColumns];
  return s_rows[threadIdx.x / 32];
}

/// Where rows are no whole pieces: a warp takes a row, in shared memory. load(at) gives what is to
/// be added up, visit(at, sum) gets the sums.
template <typename Load, typename Visit>
__device__ __forceinline__ void for_each_sum(const QuantParams& p, const QuantUnit& unit, Load load,
                                             Visit visit) {
  float* s_row = shared_row();
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const std::int32_t order = core::rotation_order(p.columns);
  const std::int64_t from = core::offset_of(p.from_strides, unit.b, unit.h, unit.first_row);
  const std::int64_t to = core::offset_of(p.to_strides, unit.b, unit.h, unit.first_row);
  for (std::int64_t r = threadIdx.x / 32; r < unit.rows; r += kWarps) {
    const auto at = [&](std::int32_t c) {
      return At{from + r * p.from_strides.row + c * p.from_strides.column,
                to + r * p.to_strides.row + c * p.to_strides.column, static_cast<std::int32_t>(r),
                c};
    };
    for (std::int32_t c = lane; c < p.columns; c += 32) s_row[c] = load(at(c));
    for (std::int32_t distance = 1; distance < order; distance *= 2) {
      __syncwarp();
      for (std::int32_t pair = lane; pair < p.columns / 2; pair += 32) {
        const std::int32_t i = 2 * pair - (pair & (distance - 1));
        const float low = s_row[i], high = s_row[i + distance];
        s_row[i] = low + high;
        s_row[i + distance] = low - high;
      }
    }
    __syncwarp();
    for (std::int32_t c = lane; c < p.columns; c += 32) visit(at(c), s_row[c]);
    __syncwarp();  // the row is read
  }
}

/// visit(at, value) for what becomes codes, where rows are no whole pieces.
template <bool kRotate, typename Visit>
__device__ __forceinline__ void for_each_wide(const QuantParams& p, const QuantUnit& unit,
                                              Visit visit) {
  const auto load = [&](const At& at) {
    return core::load_element<float>(p.from, p.wide, at.from);
  };
  if constexpr (kRotate) {
    const float norm = core::rotation_norm(core::rotation_order(p.columns));
    for_each_sum(
        p, unit, [&](const At& at) { return core::with_rotation_sign(load(at), at.column); },
        [&](const At& at, float sum) { visit(at, core::rotated(sum, norm)); });
  } else {
    for_each_element(p, unit, [&](const At& at) { visit(at, load(at)); });
  }
}

/// visit(at, 16 values, whether they are there) for what becomes codes.
template <bool kRotate, typename Visit>
__device__ __forceinline__ void for_each_wide_piece(const QuantParams& p, const QuantUnit& unit,
                                                    Visit visit) {
  for_each_piece(p, unit, [&](const At& at, bool there) {
    float x[kPiece] = {};
    if (there) load_wide(x, p.from, p.wide, at.from);
    if constexpr (kRotate) rotate_piece(p, x, at.column);
    if (there) visit(at, x);
  });
}

// ---------------------------------------------------------------------------------------------
// Errors

/// A NaN has no code. Of a rotated row the first element is named that is not finite and is rotated
/// together with this one; this one itself, if all are finite and sums were too large.
template <bool kRotate>
__device__ __forceinline__ void report_nan(const QuantParams& p, const QuantUnit& unit,
                                           const At& at) {
  if (p.error == nullptr) return;
  std::int32_t column = at.column;
  if constexpr (kRotate) {
    const std::int32_t order = core::rotation_order(p.columns);
    const std::int32_t first = at.column / order * order;
    for (std::int32_t c = first + order - 1; c >= first; --c) {
      const std::int64_t from = at.from + (c - at.column) * p.from_strides.column;
      if (is_nan(0.f * core::load_element<float>(p.from, p.wide, from))) column = c;
    }
  }
  report(p.error, {static_cast<std::int32_t>(core::ErrorCode::quantized_nan), unit.b,
                   core::element_index(p, unit, at.row, column), kRotate ? 1 : 0});
}

/// Adds or takes the maximum over the block; thread 0 has the result.
template <typename T, typename Join>
__device__ __forceinline__ T join_block(T x, Join join) {
  __shared__ T s_warps[kWarps];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = join(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  __syncthreads();  // the last unit's results are read
  if (threadIdx.x % 32 == 0) s_warps[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) x = join(x, s_warps[warp]);
  }
  return x;
}

// ---------------------------------------------------------------------------------------------
// Kernels

/// The place of scale number `index`, or -1 past the last.
__device__ __forceinline__ bool slot_at(const QuantParams& p, std::int64_t index, std::int32_t& b,
                                        std::int32_t& h, std::int32_t& block) {
  block = static_cast<std::int32_t>(index % p.slots_blocks);
  index /= p.slots_blocks;
  h = static_cast<std::int32_t>(index % p.slots_heads);
  b = static_cast<std::int32_t>(index / p.slots_heads);
  return b < p.slots_batch;
}

__global__ void __launch_bounds__(kQuantThreads)
    clear_scales(const __grid_constant__ QuantParams p) {
  std::int32_t b, h, block;
  if (!slot_at(p, static_cast<std::int64_t>(blockIdx.x) * kQuantThreads + threadIdx.x, b, h,
               block)) {
    return;
  }
  if (!p.given_scale) p.scale[core::offset_of(p.scale_strides, b, h, block)] = 0.f;
  if (p.saturated != nullptr) {
    p.saturated[core::offset_of(p.saturated_strides, b, h, block)] = 0;
  }
}

template <bool kRotate>
__global__ void __launch_bounds__(kQuantThreads)
    find_largest(const __grid_constant__ QuantParams p) {
  for_each_unit(p, [&](const QuantUnit& unit) {
    float largest = 0.f;
    if (p.vectors) {
      for_each_wide_piece<kRotate>(p, unit, [&](const At&, const float(&x)[kPiece]) {
#pragma unroll
        for (int i = 0; i < kPiece; ++i) largest = core::larger_magnitude(largest, x[i]);
      });
    } else {
      for_each_wide<kRotate>(
          p, unit, [&](const At&, float x) { largest = core::larger_magnitude(largest, x); });
    }
    largest = join_block(largest, [](float a, float c) { return fmaxf(a, c); });
    if (threadIdx.x == 0) {
      float* g_slot = p.scale + core::slot_of(p, p.scale_strides, unit);
      atomicMax(reinterpret_cast<unsigned int*>(g_slot), __float_as_uint(largest));
    }
  });
}

__global__ void __launch_bounds__(kQuantThreads)
    finish_scales(const __grid_constant__ QuantParams p) {
  std::int32_t b, h, block;
  if (!slot_at(p, static_cast<std::int64_t>(blockIdx.x) * kQuantThreads + threadIdx.x, b, h,
               block)) {
    return;
  }
  float& g_slot = p.scale[core::offset_of(p.scale_strides, b, h, block)];
  g_slot = core::scale_of_largest(p.code, g_slot);
}

template <Element kCode, bool kRotate>
__device__ __forceinline__ int encode_unit(const QuantParams& p, const QuantUnit& unit) {
  const float inverse = core::inverse_step(kCode, p.scale[core::slot_of(p, p.scale_strides, unit)]);
  auto* g_codes = static_cast<std::uint8_t*>(p.to);
  int saturated = 0;
  if (p.vectors) {
    for_each_wide_piece<kRotate>(p, unit, [&](const At& at, const float(&x)[kPiece]) {
      const Encoded piece = encode_piece<kCode>(x, inverse);
      *reinterpret_cast<uint4*>(g_codes + at.to) = piece.codes;
      saturated += piece.saturated;
      if (!core::has_nan(kCode) && piece.first_nan < kPiece) {
        const int i = piece.first_nan;
        report_nan<kRotate>(p, unit, {at.from + i, at.to + i, at.row, at.column + i});
      }
    });
  } else {
    for_each_wide<kRotate>(p, unit, [&](const At& at, float x) {
      if (!core::has_nan(kCode) && is_nan(x)) report_nan<kRotate>(p, unit, at);
      const core::Code code = core::code_of(kCode, x * inverse);
      g_codes[at.to] = code.bits;
      saturated += code.saturated ? 1 : 0;
    });
  }
  return saturated;
}

template <bool kRotate>
__global__ void __launch_bounds__(kQuantThreads) encode(const __grid_constant__ QuantParams p) {
  for_each_unit(p, [&](const QuantUnit& unit) {
    int saturated = p.code == Element::e4m3   ? encode_unit<Element::e4m3, kRotate>(p, unit)
                    : p.code == Element::e5m2 ? encode_unit<Element::e5m2, kRotate>(p, unit)
                    : p.code == Element::int8 ? encode_unit<Element::int8, kRotate>(p, unit)
                                              : encode_unit<Element::byte, kRotate>(p, unit);
    if (p.saturated == nullptr) return;  // the same in every thread
    saturated = join_block(saturated, [](int a, int c) { return a + c; });
    if (threadIdx.x == 0 && saturated > 0) {
      atomicAdd(p.saturated + core::slot_of(p, p.saturated_strides, unit), saturated);
    }
  });
}

template <bool kRotate>
__global__ void __launch_bounds__(kQuantThreads) decode(const __grid_constant__ QuantParams p) {
  for_each_unit(p, [&](const QuantUnit& unit) {
    const float step = core::step_of(p.code, p.scale[core::slot_of(p, p.scale_strides, unit)]);
    const auto* g_codes = static_cast<const std::uint8_t*>(p.from);
    const auto value_at = [&](const At& at) { return code_to_float(p.code, g_codes[at.from]); };
    if (p.vectors) {
      for_each_piece(p, unit, [&](const At& at, bool there) {
        uint4 codes = {};
        if (there) codes = __ldcs(reinterpret_cast<const uint4*>(g_codes + at.from));
        const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        float x[kPiece];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 four = codes_to_floats(p.code, words[i]);
          x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
        }
        if constexpr (kRotate) rotate_piece_back(p, x, at.column);
#pragma unroll
        for (int i = 0; i < kPiece; ++i) x[i] *= step;
        if (there) store_wide(p.to, p.wide, at.to, x);
      });
    } else if constexpr (kRotate) {
      const float norm = core::rotation_norm(core::rotation_order(p.columns));
      for_each_sum(p, unit, value_at, [&](const At& at, float sum) {
        const float x = core::with_rotation_sign(core::rotated(sum, norm), at.column);
        core::store_element(p.to, p.wide, at.to, x * step);
      });
    } else {
      for_each_element(p, unit, [&](const At& at) {
        core::store_element(p.to, p.wide, at.to, value_at(at) * step);
      });
    }
  });
}

template <typename Kernel>
const void* address(Kernel* kernel) noexcept {
  return reinterpret_cast<const void*>(kernel);
}

}  // namespace

const void* clear_scales_entry() noexcept { return address(&clear_scales); }
const void* find_largest_entry(bool rotate) noexcept {
  return rotate ? address(&find_largest<true>) : address(&find_largest<false>);
}
const void* finish_scales_entry() noexcept { return address(&finish_scales); }
const void* encode_entry(bool rotate) noexcept {
  return rotate ? address(&encode<true>) : address(&encode<false>);
}
const void* decode_entry(bool rotate) noexcept {
  return rotate ? address(&decode<true>) : address(&decode<false>);
}

}  // namespace flashcore::cuda
