// A boolean mask on the scores of a step, from bits (core/packed_mask.h).
#pragma once

#include "core/packed_mask.h"
#include "cuda/primitives/compiler.cuh"
#include "cuda/primitives/memory.cuh"
#include "cuda/sm90/config.cuh"

namespace flashcore::cuda::sm90 {

/// A thread's first row, at the words of its lane.
template <typename C>
__device__ __forceinline__ const std::uint32_t* mask_row(const core::PackedMask& mask,
                                                         const WorkTile& work, const Thread<C>& t) {
  return mask.words + t.lane % 4 + mask.row_offset(work.b, head_of(work, t), query_of(work, t, 0));
}

/// Loads the bits of a thread's two rows: bit 2 n + i is key 8 n + 2 (lane % 4) + i of the tile.
/// Rows past the last query are computed, not stored: they may have any bits.
template <typename C>
__device__ __forceinline__ void load_mask_bits(std::uint32_t (&bits)[2], const std::uint32_t* g_row,
                                               const core::PackedMask& mask, std::int32_t tile) {
  constexpr int kGroups = C::kTileK / 16;  // of 16 keys: four bits of a word
  const std::int32_t group = tile * kGroups, block = group / 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t* g_bits = g_row + (mask.rows > 1 ? 8 * half * 4 * mask.blocks : 0);
    bits[half] = load_global(g_bits + 4 * block);
    if constexpr (kGroups < 8) {  // a tile begins in the middle of a word and may end in the next
      const std::uint32_t next = load_global(g_bits + 4 * min(block + 1, mask.blocks - 1));
      bits[half] = __funnelshift_r(bits[half], next, 4 * (group % 8));
    }
  }
}

/// Sets the scores of hidden keys to -inf.
template <typename C>
__device__ __forceinline__ void hide_masked_keys(AccS<C>& acc_s, const std::uint32_t (&bits)[2]) {
  constexpr std::uint32_t kAll = ~0u >> (32 - C::kTileK / 4);
  if (__all_sync(0xffffffffu, (bits[0] & bits[1] & kAll) == kAll)) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < C::kTileK / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if ((bits[half] >> (2 * n + i) & 1u) == 0) {
          acc_s[4 * n + 2 * half + i] = core::negative_infinity<float>();
        }
      }
    }
  }
}

}  // namespace flashcore::cuda::sm90
