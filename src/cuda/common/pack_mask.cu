// Packs a boolean mask into bits and finds the key range of each group of rows
// (core/packed_mask.h).
//
//   grid   one CTA per group of 16 rows; CTAs loop if the grid is smaller
//   warps  one row each, 128 keys at a time; a ballot makes a word: lane l has the key of bit l
#include <cuda_runtime.h>

#include "core/packed_mask.h"
#include "core/row_offset.h"
#include "cuda/registry.h"

namespace flashcore::cuda {
namespace {

/// Packs a row. Returns its range of blocks, as keys.
__device__ __forceinline__ core::KeyRange pack_row(const core::PackMaskParams& p, std::int32_t b,
                                                   std::int32_t h, std::int32_t row) {
  const int lane = threadIdx.x % 32;
  const std::uint8_t* g_row = p.mask + core::row_offset(p.strides, b, h, row);
  std::uint32_t* g_words = p.packed.words + p.packed.row_offset(b, h, row);
  core::KeyRange range{p.packed.blocks * core::kMaskBlockKeys, 0};
#pragma unroll 4
  for (std::int32_t block = 0; block < p.packed.blocks; ++block) {
    std::uint32_t word = 0, any = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const std::int32_t key = core::mask_key(block, c, lane);
      const bool visible = key < p.kv_len && g_row[key * p.strides.column] != 0;
      const std::uint32_t bits = __ballot_sync(0xffffffffu, visible);
      any |= bits;
      if (lane == c) word = bits;
    }
    if (lane < 4) g_words[4 * block + lane] = word;
    if (any != 0) {
      range.begin = min(range.begin, block * core::kMaskBlockKeys);
      range.end = (block + 1) * core::kMaskBlockKeys;
    }
  }
  return range;
}

__global__ void __launch_bounds__(kPackMaskThreads)
    pack_mask(const __grid_constant__ core::PackMaskParams p) {
  static_assert(kPackMaskThreads / 32 == core::kMaskRangeRows);
  __shared__ core::KeyRange s_ranges[core::kMaskRangeRows];
  const int warp = threadIdx.x / 32;
  for (std::int64_t index = blockIdx.x; index < p.packed.range_count(); index += gridDim.x) {
    const auto group = static_cast<std::int32_t>(index % p.packed.row_groups);
    const auto plane = static_cast<std::int32_t>(index / p.packed.row_groups);
    const std::int32_t row = group * core::kMaskRangeRows + warp;
    core::KeyRange range{0x7fffffff, 0};
    if (row < p.packed.rows) {
      range = pack_row(p, plane / p.packed.heads, plane % p.packed.heads, row);
    }
    if (threadIdx.x % 32 == 0) s_ranges[warp] = range;
    __syncthreads();
    if (threadIdx.x == 0) {
      core::KeyRange all = s_ranges[0];
      for (const core::KeyRange& one : s_ranges) {
        all.begin = min(all.begin, one.begin);
        all.end = max(all.end, one.end);
      }
      p.packed.ranges[index] = all;
    }
    __syncthreads();
  }
}

}  // namespace

const void* pack_mask_entry() noexcept { return reinterpret_cast<const void*>(&pack_mask); }

}  // namespace flashcore::cuda
