// Quantising and dequantising: core/quantize.h says what shares a scale, this streams through it.
//
//   grid     a few blocks per SM; a block takes one unit (rows of one head with one scale) after
//   the
//            other
//   threads  pieces of 16 elements: 16 bytes of codes, 32 or 64 of wide values, all loads first; or
//            single elements where rows are no whole pieces
//   passes   where scales are to be found: clear, largest magnitude (an atomic maximum per unit, of
//            floats >= 0 as integers: the order does not matter), scale from it, codes
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

/// The codes of 16 values in steps, and how many saturated.
template <Element kCode>
__device__ __forceinline__ uint4 encode_piece(const float (&x)[kPiece], float inverse,
                                              int& saturated) {
  std::uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    const core::Code code = core::code_of(kCode, x[i] * inverse);
    words[i / 4] |= static_cast<std::uint32_t>(code.bits) << (8 * (i % 4));
    saturated += code.saturated ? 1 : 0;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// ---------------------------------------------------------------------------------------------
// Units

/// visit(offset in from, offset in to, row of the unit, column) for each of the unit's pieces or
/// elements, shared out over the block's threads.
template <typename Visit>
__device__ __forceinline__ void for_each_step(const QuantParams& p, const QuantUnit& unit, int step,
                                              Visit visit) {
  const std::int32_t per_row = p.columns / step;
  const std::int64_t from = core::offset_of(p.from_strides, unit.b, unit.h, unit.first_row);
  const std::int64_t to = core::offset_of(p.to_strides, unit.b, unit.h, unit.first_row);
  const std::int64_t steps = static_cast<std::int64_t>(unit.rows) * per_row;
#pragma unroll 2
  for (std::int64_t i = threadIdx.x; i < steps; i += kQuantThreads) {
    const auto row = static_cast<std::int32_t>(i / per_row);
    const auto column = static_cast<std::int32_t>(i % per_row) * step;
    visit(from + row * p.from_strides.row + column * p.from_strides.column,
          to + row * p.to_strides.row + column * p.to_strides.column, row, column);
  }
}

template <typename Body>
__device__ __forceinline__ void for_each_unit(const QuantParams& p, Body body) {
  const std::int64_t units = core::quant_units(p);
  for (std::int64_t i = blockIdx.x; i < units; i += gridDim.x) body(core::quant_unit(p, i));
}

__device__ __forceinline__ bool is_nan(float x) { return x != x; }

__device__ __forceinline__ void report_nan(const QuantParams& p, const QuantUnit& unit,
                                           std::int32_t row, std::int32_t column) {
  report(p.error, {static_cast<std::int32_t>(core::ErrorCode::quantized_nan), unit.b,
                   core::element_index(p, unit, row, column), 0});
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

__global__ void __launch_bounds__(kQuantThreads)
    find_largest(const __grid_constant__ QuantParams p) {
  for_each_unit(p, [&](const QuantUnit& unit) {
    float largest = 0.f;
    if (p.vectors) {
      for_each_step(p, unit, kPiece, [&](std::int64_t from, std::int64_t, int, int) {
        float x[kPiece];
        load_wide(x, p.from, p.wide, from);
#pragma unroll
        for (int i = 0; i < kPiece; ++i) largest = core::larger_magnitude(largest, x[i]);
      });
    } else {
      for_each_step(p, unit, 1, [&](std::int64_t from, std::int64_t, int, int) {
        largest = core::larger_magnitude(largest, core::load_element<float>(p.from, p.wide, from));
      });
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

template <Element kCode>
__device__ __forceinline__ int encode_unit(const QuantParams& p, const QuantUnit& unit) {
  const float inverse = core::inverse_step(kCode, p.scale[core::slot_of(p, p.scale_strides, unit)]);
  auto* g_codes = static_cast<std::uint8_t*>(p.to);
  int saturated = 0;
  if (p.vectors) {
    for_each_step(p, unit, kPiece, [&](std::int64_t from, std::int64_t to, int row, int column) {
      float x[kPiece];
      load_wide(x, p.from, p.wide, from);
      if (!core::has_nan(kCode)) {
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
          if (is_nan(x[i])) report_nan(p, unit, row, column + i);
        }
      }
      *reinterpret_cast<uint4*>(g_codes + to) = encode_piece<kCode>(x, inverse, saturated);
    });
  } else {
    for_each_step(p, unit, 1, [&](std::int64_t from, std::int64_t to, int row, int column) {
      const float x = core::load_element<float>(p.from, p.wide, from);
      if (!core::has_nan(kCode) && is_nan(x)) report_nan(p, unit, row, column);
      const core::Code code = core::code_of(kCode, x * inverse);
      g_codes[to] = code.bits;
      saturated += code.saturated ? 1 : 0;
    });
  }
  return saturated;
}

__global__ void __launch_bounds__(kQuantThreads) encode(const __grid_constant__ QuantParams p) {
  for_each_unit(p, [&](const QuantUnit& unit) {
    int saturated = p.code == Element::e4m3   ? encode_unit<Element::e4m3>(p, unit)
                    : p.code == Element::e5m2 ? encode_unit<Element::e5m2>(p, unit)
                    : p.code == Element::int8 ? encode_unit<Element::int8>(p, unit)
                                              : encode_unit<Element::byte>(p, unit);
    if (p.saturated == nullptr) return;  // the same in every thread
    saturated = join_block(saturated, [](int a, int c) { return a + c; });
    if (threadIdx.x == 0 && saturated > 0) {
      atomicAdd(p.saturated + core::slot_of(p, p.saturated_strides, unit), saturated);
    }
  });
}

__global__ void __launch_bounds__(kQuantThreads) decode(const __grid_constant__ QuantParams p) {
  for_each_unit(p, [&](const QuantUnit& unit) {
    const float step = core::step_of(p.code, p.scale[core::slot_of(p, p.scale_strides, unit)]);
    const auto* g_codes = static_cast<const std::uint8_t*>(p.from);
    if (p.vectors) {
      for_each_step(p, unit, kPiece, [&](std::int64_t from, std::int64_t to, int, int) {
        const uint4 codes = __ldcs(reinterpret_cast<const uint4*>(g_codes + from));
        const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        float x[kPiece];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 four = codes_to_floats(p.code, words[i]);
          x[4 * i] = four.x * step, x[4 * i + 1] = four.y * step;
          x[4 * i + 2] = four.z * step, x[4 * i + 3] = four.w * step;
        }
        store_wide(p.to, p.wide, to, x);
      });
    } else {
      for_each_step(p, unit, 1, [&](std::int64_t from, std::int64_t to, int, int) {
        core::store_element(p.to, p.wide, to, code_to_float(p.code, g_codes[from]) * step);
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
const void* find_largest_entry() noexcept { return address(&find_largest); }
const void* finish_scales_entry() noexcept { return address(&finish_scales); }
const void* encode_entry() noexcept { return address(&encode); }
const void* decode_entry() noexcept { return address(&decode); }

}  // namespace flashcore::cuda
