// Quantising and dequantising. core/quantize.h defines units and scales.
//
//   grid      CTAs loop over units: rows of one head that share a scale
//   threads   vectors of 16 elements: 16 bytes of 8-bit values, 32 or 64 bytes of wide values. The
//             next vector is loaded before the current one is processed. Single elements if rows
//             are not whole vectors
//   passes    if scales are computed: clear, largest magnitude, scale, encode. The largest value
//             is an atomic integer maximum on the bits of floats >= 0: order does not matter
//   rotation  in every pass that reads values: in registers and between lanes, or in shared memory
//             if rows are not whole vectors
#include "core/quantize.h"

#include "core/element.h"
#include "cuda/common/quantize_rows.cuh"
#include "cuda/common/quantize_vec16.cuh"
#include "cuda/registry.h"

namespace flashcore::cuda {
namespace {

// Minimum CTAs per SM for __launch_bounds__, which limits registers: the largest number that spills
// on no architecture. At most 1024 threads, sm_75's limit.
constexpr int kFindBlocks = 4;
constexpr int encode_blocks(bool f32, bool rotate) { return f32 ? 2 : rotate ? 3 : 4; }
constexpr int decode_blocks(bool rotate) { return rotate ? 3 : 4; }

constexpr std::uint32_t kInfinityBits = 0x7f800000u;

// ---------------------------------------------------------------------------------------------
// Scales

/// The coordinates of scale number `index`. Returns false past the last scale.
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
  if (!p.given_scale) p.scale[core::row_offset(p.scale_strides, b, h, block)] = 0.f;
  if (p.saturated != nullptr) {
    p.saturated[core::row_offset(p.saturated_strides, b, h, block)] = 0;
  }
}

/// Takes the maximum of largest_of(unit) over the CTA's threads into the scale of each unit.
template <typename LargestOf>
__device__ __forceinline__ void find_largest(const QuantParams& p, LargestOf largest_of) {
  for_each_unit(p, [&](const QuantUnit& unit) {
    const float largest =
        reduce_cta(largest_of(unit), [](float a, float c) { return fmaxf(a, c); });
    if (threadIdx.x == 0) {
      float* g_slot = p.scale + core::slot_of(p, p.scale_strides, unit);
      atomicMax(reinterpret_cast<unsigned int*>(g_slot), __float_as_uint(largest));
    }
  });
}

template <bool kF32, bool kRotate>
__global__ void __launch_bounds__(kQuantThreads, kFindBlocks)
    find_largest_in_vecs(const __grid_constant__ QuantParams p) {
  [[maybe_unused]] const Rotation rotation(p.columns);
  find_largest(p, [&](const QuantUnit& unit) {
    std::uint32_t bits = 0;
    float largest = 0.f;
    bool carefully = false;  // second pass, after a non-finite value: it skips such values
#pragma unroll 1
    do {
      for_each_vec(  // repeated vectors do not change a maximum
          p, unit, [&](std::int64_t from) { return load_wide<kF32>(p.from, from); },
          [&](const At& at, const WideVec<kF32>& vec, bool) {
            float x[kVec];
            to_floats(x, vec, p.wide);
            if constexpr (kRotate) rotate_vec(rotation, x, at.column);
            if (!carefully) {
              bits = max(bits, largest_bits(x));
              return;
            }
#pragma unroll
            for (int i = 0; i < kVec; ++i) largest = core::larger_magnitude(largest, x[i]);
          });
      if (carefully) return largest;
      carefully = __any_sync(0xffffffffu, bits >= kInfinityBits);
    } while (carefully);
    return __uint_as_float(bits);
  });
}

/// Calls visit(at, value) for each wide value of the unit, rotated if kRotate.
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

template <bool kRotate>
__global__ void __launch_bounds__(kQuantThreads, 2)
    find_largest_in_elements(const __grid_constant__ QuantParams p) {
  find_largest(p, [&](const QuantUnit& unit) {
    float largest = 0.f;
    for_each_wide<kRotate>(
        p, unit, [&](const At&, float x) { largest = core::larger_magnitude(largest, x); });
    return largest;
  });
}

__global__ void __launch_bounds__(kQuantThreads)
    finish_scales(const __grid_constant__ QuantParams p) {
  std::int32_t b, h, block;
  if (!slot_at(p, static_cast<std::int64_t>(blockIdx.x) * kQuantThreads + threadIdx.x, b, h,
               block)) {
    return;
  }
  float& g_slot = p.scale[core::row_offset(p.scale_strides, b, h, block)];
  g_slot = core::scale_of_largest(p.code, g_slot);
}

// ---------------------------------------------------------------------------------------------
// Encoding

/// Calls encode(unit) for each unit. It returns the number of this thread's elements that
/// saturated; their sum goes to p.saturated.
template <typename Encode>
__device__ __forceinline__ void encode_units(const QuantParams& p, Encode encode) {
  for_each_unit(p, [&](const QuantUnit& unit) {
    int saturated = encode(unit);
    if (p.saturated == nullptr) return;  // uniform over the CTA
    saturated = reduce_cta(saturated, [](int a, int c) { return a + c; });
    if (threadIdx.x == 0 && saturated > 0) {
      atomicAdd(p.saturated + core::slot_of(p, p.saturated_strides, unit), saturated);
    }
  });
}

template <bool kF32, bool kRotate>
__global__ void __launch_bounds__(kQuantThreads, encode_blocks(kF32, kRotate))
    encode_vecs(const __grid_constant__ QuantParams p) {
  [[maybe_unused]] const Rotation rotation(p.columns);
  encode_units(p, [&](const QuantUnit& unit) {
    const float inverse =
        core::inverse_step(p.code, p.scale[core::slot_of(p, p.scale_strides, unit)]);
    int saturated = 0;
    const auto encode = [&](const At& at, const WideVec<kF32>& vec, bool there) {
      float x[kVec];
      to_floats(x, vec, p.wide);
      if constexpr (kRotate) rotate_vec(rotation, x, at.column);
      if (!there) return;
      uint4& g_codes = *reinterpret_cast<uint4*>(static_cast<std::uint8_t*>(p.to) + at.to);
      if (!has_specials(x, inverse, p.code)) {
        g_codes = encode_vec(x, inverse, p.code);
        return;
      }
      const EncodedSpecials made = encode_specials<kRotate>(x, inverse, p.code);
      g_codes = made.codes;
      saturated += made.saturated;
      if (!core::has_nan(p.code) && made.first_nan < kVec) {
        report_nan<kRotate>(p, unit, at.row, at.column + made.first_nan);
      }
    };
    for_each_vec(
        p, unit, [&](std::int64_t from) { return load_wide<kF32>(p.from, from); }, encode);
    return saturated;
  });
}

template <bool kRotate>
__global__ void __launch_bounds__(kQuantThreads, 2)
    encode_elements(const __grid_constant__ QuantParams p) {
  encode_units(p, [&](const QuantUnit& unit) {
    const float inverse =
        core::inverse_step(p.code, p.scale[core::slot_of(p, p.scale_strides, unit)]);
    int saturated = 0;
    for_each_wide<kRotate>(p, unit, [&](const At& at, float x) {
      if (!core::has_nan(p.code) && x != x) report_nan<kRotate>(p, unit, at.row, at.column);
      const core::Code code = core::encode(p.code, x * inverse);
      static_cast<std::uint8_t*>(p.to)[at.to] = code.bits;
      saturated += code.saturated ? 1 : 0;
    });
    return saturated;
  });
}

// ---------------------------------------------------------------------------------------------
// Decoding

template <bool kF32, bool kRotate>
__global__ void __launch_bounds__(kQuantThreads, decode_blocks(kRotate))
    decode_vecs(const __grid_constant__ QuantParams p) {
  [[maybe_unused]] const Rotation rotation(p.columns);
  for_each_unit(p, [&](const QuantUnit& unit) {
    const float step = core::step_of(p.code, p.scale[core::slot_of(p, p.scale_strides, unit)]);
    const auto load = [&](std::int64_t from) {
      const auto* g_codes = static_cast<const std::uint8_t*>(p.from) + from;
      return __ldcs(reinterpret_cast<const uint4*>(g_codes));
    };
    for_each_vec(p, unit, load, [&](const At& at, const uint4& codes, bool there) {
      float x[kVec];
      decode_vec(x, codes, p.code);
      if constexpr (kRotate) rotate_piece_back(rotation, x, at.column);
#pragma unroll
      for (int i = 0; i < kVec; ++i) x[i] *= step;
      if (there) store_wide<kF32>(p.to, at.to, x, p.wide);
    });
  });
}

template <bool kRotate>
__global__ void __launch_bounds__(kQuantThreads, 2)
    decode_elements(const __grid_constant__ QuantParams p) {
  for_each_unit(p, [&](const QuantUnit& unit) {
    const float step = core::step_of(p.code, p.scale[core::slot_of(p, p.scale_strides, unit)]);
    const auto value_at = [&](const At& at) {
      return decode_8bit(p.code, static_cast<const std::uint8_t*>(p.from)[at.from]);
    };
    if constexpr (kRotate) {
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

// ---------------------------------------------------------------------------------------------
// Kernel selection

template <typename Kernel>
const void* address(Kernel* kernel) noexcept {
  return reinterpret_cast<const void*>(kernel);
}

template <bool kRotate>
const void* find_largest_of(const QuantParams& p) noexcept {
  if (!p.vectors) return address(&find_largest_in_elements<kRotate>);
  return p.wide == Element::f32 ? address(&find_largest_in_vecs<true, kRotate>)
                                : address(&find_largest_in_vecs<false, kRotate>);
}

template <bool kRotate>
const void* encode_of(const QuantParams& p) noexcept {
  if (!p.vectors) return address(&encode_elements<kRotate>);
  return p.wide == Element::f32 ? address(&encode_vecs<true, kRotate>)
                                : address(&encode_vecs<false, kRotate>);
}

template <bool kRotate>
const void* decode_of(const QuantParams& p) noexcept {
  if (!p.vectors) return address(&decode_elements<kRotate>);
  return p.wide == Element::f32 ? address(&decode_vecs<true, kRotate>)
                                : address(&decode_vecs<false, kRotate>);
}

}  // namespace

const void* clear_scales_entry() noexcept { return address(&clear_scales); }
const void* find_largest_entry(const QuantParams& p) noexcept {
  return p.rotate ? find_largest_of<true>(p) : find_largest_of<false>(p);
}
const void* finish_scales_entry() noexcept { return address(&finish_scales); }
const void* encode_entry(const QuantParams& p) noexcept {
  return p.rotate ? encode_of<true>(p) : encode_of<false>(p);
}
const void* decode_entry(const QuantParams& p) noexcept {
  return p.rotate ? decode_of<true>(p) : decode_of<false>(p);
}

}  // namespace flashcore::cuda
