// Kernels for 8-bit K and V: loads of Q and of the scales, before the mainloop.
#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/memory.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm80/dequant.cuh"
#include "cuda/sm80/load.cuh"

namespace flashcore::cuda::sm80 {

/// 16 columns of a query from `column` on, 16-bit or 8-bit, in the order of even_odd_index():
/// `even` is the first chunk, `odd` the second. Past head_dim they are 0.
template <typename C, bool kFastPath>
__device__ __forceinline__ void load_paired_columns(std::uint32_t (&even)[4],
                                                    std::uint32_t (&odd)[4],
                                                    const AttentionParams& p, std::int64_t offset,
                                                    int column) {
  const int left = p.head_dim - column;
  const bool vectors = !C::template kAnyDim<kFastPath> || (p.async_rows && left >= 16);
  const std::int64_t first = offset + column * p.q_strides.column;
  if (core::is_8bit(p.q_element)) {
    const auto* g_q = static_cast<const std::uint8_t*>(p.q) + first;
    std::uint32_t bytes[4];
    if (vectors) {
      const uint4 all = *reinterpret_cast<const uint4*>(g_q);
      bytes[0] = all.x, bytes[1] = all.y, bytes[2] = all.z, bytes[3] = all.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bytes[i] = gather_word(g_q + 4 * i * p.q_strides.column, left - 4 * i, p.q_strides.column,
                               core::zero_codes(p.q_element));
      }
    }
    with_dequantizer<C>(p, p.q_element, [&](auto dequantize) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const core::F16x2Pair pairs = dequantize(bytes[i]);
        even[i] = pairs.even;
        odd[i] = pairs.odd;
      }
    });
    return;
  }
  const auto* g_q = static_cast<const std::uint16_t*>(p.q) + first;
  std::uint32_t words[8];
  if (vectors) {
    const uint4 low = *reinterpret_cast<const uint4*>(g_q);
    const uint4 high = *reinterpret_cast<const uint4*>(g_q + 8);
    words[0] = low.x, words[1] = low.y, words[2] = low.z, words[3] = low.w;
    words[4] = high.x, words[5] = high.y, words[6] = high.z, words[7] = high.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      words[i] = gather_word(g_q + 2 * i * p.q_strides.column, left - 2 * i, p.q_strides.column);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    even[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x5410);
    odd[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7632);
  }
}

/// Converts a bf16 row of Q, held by kLanes adjacent lanes, to f16. A power of two brings its
/// largest magnitude to 2^14 or more; values that underflow are then below 2^-38 of the largest.
/// Returns the factor that undoes it.
template <int kLanes>
__device__ __forceinline__ float bf16_row_to_f16(std::uint32_t (&even)[4],
                                                 std::uint32_t (&odd)[4]) {
  std::uint32_t largest = 0;  // bf16 without the sign: larger bits, larger value
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    largest = max(largest, max(even[i] & 0x7fffu, even[i] >> 16 & 0x7fffu));
    largest = max(largest, max(odd[i] & 0x7fffu, odd[i] >> 16 & 0x7fffu));
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  // Infinities and NaN survive any factor.
  const int exponent = min(max(static_cast<int>(largest >> 7), 15), 253) - 127;
  const float unit = core::float_of_bits(static_cast<std::uint32_t>(127 + exponent - 14) << 23);
  const float inverse = core::float_of_bits(static_cast<std::uint32_t>(127 - exponent + 14) << 23);
  const auto convert = [&](std::uint32_t pair) {
    return pack<__half>(core::float_of_bits(pair << 16) * inverse,
                        core::float_of_bits(pair & 0xffff0000u) * inverse);
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    even[i] = convert(even[i]);
    odd[i] = convert(odd[i]);
  }
  return unit;
}

/// Loads Q [tile_q, head_dim] in the column order of dequantized K, and writes the row scales: the
/// factor that undoes the conversion to f16 times `row_scale`. store_scales() writes those of 8-bit
/// Q.
template <typename C, bool kFastPath>
__device__ __forceinline__ void load_paired_q(SharedStorage<C>& s, const AttentionParams& p,
                                              const WorkTile& work, float row_scale) {
  using Tile = typename C::QueryTile;
  constexpr int kGroups = C::kHeadDim / 16;
  const std::int64_t sequence = work.b * p.q_strides.batch + work.seq.q_row * p.q_strides.row;
#pragma unroll(kFastPath ? 4 : 1)
  for (int index = threadIdx.x; index < C::kTileQ * kGroups; index += C::kThreads) {
    const int r = index / kGroups, group = index % kGroups;
    std::uint32_t even[4] = {}, odd[4] = {};
    if (r < work.rows && (!C::template kAnyDim<kFastPath> || 16 * group < p.head_dim)) {
      const Row row = row_of(p, work, r);
      load_paired_columns<C, kFastPath>(
          even, odd, p, sequence + row.head * p.q_strides.head + row.query * p.q_strides.row,
          16 * group);
    }
    if (!core::is_8bit(p.q_element)) {
      const float unit =
          p.q_element == core::Element::bf16 ? bf16_row_to_f16<kGroups>(even, odd) : 1.f;
      if (group == 0) s.row_scale[r] = row_scale * unit;
    }
    const std::uint32_t s_q = shared_address(s.q);
    store_shared_16(s_q + Tile::offset(r, 2 * group), even);
    store_shared_16(s_q + Tile::offset(r, 2 * group + 1), odd);
  }
}

/// Scales of the work tile. Scales per block of K and V come with the tiles.
struct TileScales {
  float row;  // of row threadIdx.x of the tile
  float output;
};

/// Reads the scales. Nothing depends on the values yet, so that the loads overlap those of Q.
template <typename C>
__device__ __forceinline__ TileScales load_tile_scales(const AttentionParams& p,
                                                       const WorkTile& work) {
  static_assert(C::kTileQ <= C::kThreads);
  const auto of_head = [&](core::Element element, const core::Scales& scales) {
    return core::code_unit(element) *
           (scales.is_per_block() ? core::format_step(element)
                                  : core::row_scale(p, element, scales, work.b, work.kv_head, 0));
  };
  TileScales tile{core::score_scale<float>(p) * of_head(p.k_element, p.k_scale),
                  of_head(p.v_element, p.v_scale)};
  if (core::is_8bit(p.q_element)) {
    const Row row = row_of(p, work, min(static_cast<int>(threadIdx.x), work.rows - 1));
    tile.row *= core::code_unit(p.q_element) *
                core::row_scale(p, p.q_element, p.q_scale, work.b, row.head, row.query);
  }
  return tile;
}

/// Writes the scales to shared memory. V's scales per block may be far from 1; a unit, the power of
/// two near the largest of them, keeps their products with P in the range of f16.
template <typename C>
__device__ __forceinline__ void store_scales(Kv8Scales<C>& s, const TileScales& scales,
                                             const AttentionParams& p, const WorkTile& work) {
  if (core::is_8bit(p.q_element) && threadIdx.x < C::kTileQ) s.row_scale[threadIdx.x] = scales.row;
  if (threadIdx.x >= 32) return;
  float unit = 1.f;
  if (p.v_scale.is_per_block() && !work.visible.empty()) {
    const float* g_scales = p.v_scale.address(work.b, work.kv_head, 0);
    float largest = 0.f;
    const std::int32_t end = (work.visible.end - 1) / p.v_scale.block_rows + 1;
    for (std::int32_t block = work.visible.begin / p.v_scale.block_rows + threadIdx.x; block < end;
         block += 32) {
      largest = max_ignore_nan(largest, fabsf(g_scales[block * p.v_scale.block]));
    }
    unit = core::power_of_two_near(warp_max(largest));
  }
  if (threadIdx.x == 0) {
    s.v_unit_inverse = 1.f / unit;
    s.output_scale = unit * scales.output;
  }
}

}  // namespace flashcore::cuda::sm80
