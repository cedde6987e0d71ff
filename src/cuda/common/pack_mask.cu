// Packs a boolean mask or a block mask into bits and finds the key range of each group of rows
// (core/packed_mask.h).
//
//   grid   one CTA per group of 16 rows; CTAs loop if the grid is smaller
//   warps  one row each, 128 keys at a time; a ballot makes a word: lane l has the key of bit l.
//          Of a block mask each lane first classifies 128 keys of its own. Only mixed ones need
//          ballots.
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

/// Whether all 128 keys of a packed block are hidden or all are visible to a row.
enum class PackedBlock { hidden, visible, mixed };

__device__ __forceinline__ PackedBlock classify(const core::PackMaskParams& p,
                                                const std::int32_t* g_entries, std::int32_t block) {
  const std::int32_t first = block * core::kMaskBlockKeys;
  const std::int32_t keys = min(p.kv_len - first, core::kMaskBlockKeys);
  bool all = keys == core::kMaskBlockKeys, any = false;
#pragma unroll 1
  for (std::int32_t key = first; key < first + keys; key += 1 << p.block_mask.k_shift) {
    const std::int32_t entry = p.block_mask.entry(g_entries, key);
    all = all && entry == core::kVisibleBlock;
    any = any || entry != core::kHiddenBlock;
  }
  return all ? PackedBlock::visible : any ? PackedBlock::mixed : PackedBlock::hidden;
}

/// pack_row() of a block mask. Each lane has one of 32 blocks of 128 keys.
__device__ __forceinline__ core::KeyRange pack_row_of_blocks(const core::PackMaskParams& p,
                                                             std::int32_t b, std::int32_t h,
                                                             std::int32_t row) {
  const int lane = threadIdx.x % 32;
  const std::int32_t* g_entries = p.block_mask.row(b, h, row);
  std::uint32_t* g_words = p.packed.words + p.packed.row_offset(b, h, row);
  core::KeyRange range{p.packed.blocks * core::kMaskBlockKeys, 0};
  for (std::int32_t first = 0; first < p.packed.blocks; first += 32) {
    const std::int32_t own = first + lane;
    const PackedBlock kind =
        own < p.packed.blocks ? classify(p, g_entries, own) : PackedBlock::hidden;
    bool any = kind == PackedBlock::visible;
    if (own < p.packed.blocks && kind != PackedBlock::mixed) {
      const std::uint32_t word = any ? ~0u : 0u;
      reinterpret_cast<uint4*>(g_words)[own] = make_uint4(word, word, word, word);
    }
    std::uint32_t mixed = __ballot_sync(0xffffffffu, kind == PackedBlock::mixed);
    while (mixed != 0) {
      const int other = __ffs(static_cast<int>(mixed)) - 1;
      mixed &= mixed - 1;
      const std::int32_t block = first + other;
      std::uint32_t seen = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const std::int32_t key = core::mask_key(block, c, lane);
        const bool visible = key < p.kv_len && p.block_mask.shows(g_entries, row, key);
        const std::uint32_t bits = __ballot_sync(0xffffffffu, visible);
        seen |= bits;
        if (lane == c) g_words[4 * block + c] = bits;
      }
      if (lane == other) any = seen != 0;
    }
    const std::uint32_t shown = __ballot_sync(0xffffffffu, any);
    if (shown != 0) {
      const int lowest = __ffs(static_cast<int>(shown)) - 1, highest = 31 - __clz(shown);
      range.begin = min(range.begin, (first + lowest) * core::kMaskBlockKeys);
      range.end = (first + highest + 1) * core::kMaskBlockKeys;
    }
  }
  return range;
}

/// Packs the groups of 16 rows of this CTA by pack(b, h, row).
template <typename Pack>
__device__ __forceinline__ void pack_groups(const core::PackMaskParams& p, Pack pack) {
  static_assert(kPackMaskThreads / 32 == core::kMaskRangeRows);
  __shared__ core::KeyRange s_ranges[core::kMaskRangeRows];
  const int warp = threadIdx.x / 32;
  for (std::int64_t index = blockIdx.x; index < p.packed.range_count(); index += gridDim.x) {
    const auto group = static_cast<std::int32_t>(index % p.packed.row_groups);
    const auto plane = static_cast<std::int32_t>(index / p.packed.row_groups);
    const std::int32_t row = group * core::kMaskRangeRows + warp;
    core::KeyRange range{0x7fffffff, 0};
    if (row < p.packed.rows) {
      range = pack(plane / p.packed.heads, plane % p.packed.heads, row);
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

__global__ void __launch_bounds__(kPackMaskThreads)
    pack_mask(const __grid_constant__ core::PackMaskParams p) {
  pack_groups(
      p, [&](std::int32_t b, std::int32_t h, std::int32_t row) { return pack_row(p, b, h, row); });
}

__global__ void __launch_bounds__(kPackMaskThreads)
    pack_block_mask(const __grid_constant__ core::PackMaskParams p) {
  pack_groups(p, [&](std::int32_t b, std::int32_t h, std::int32_t row) {
    return pack_row_of_blocks(p, b, h, row);
  });
}

}  // namespace

const void* pack_mask_entry() noexcept { return reinterpret_cast<const void*>(&pack_mask); }

const void* pack_block_mask_entry() noexcept {
  return reinterpret_cast<const void*>(&pack_block_mask);
}

}  // namespace flashcore::cuda
