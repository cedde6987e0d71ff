// A boolean mask on the scores of a step, as bits of the thread's scores. Large query tiles read
// bits that a kernel of its own has packed (core/packed_mask.h); small ones read bytes, because
// packing them would take as long as the call.
#pragma once

#include "core/packed_mask.h"
#include "core/score.h"
#include "cuda/primitives/memory.cuh"
#include "cuda/sm80/config.cuh"

namespace flashcore::cuda::sm80 {

/// Bit 2 n + i of row (m, half): the key of acc_s[m][n][reg_of(half, i)] is visible.
template <typename C>
struct MaskBits {
  std::uint32_t row[C::kRowTiles][2];
};

/// The mask's row of a row of the tile: its index in the packed mask, or its offset in bytes. Of a
/// block mask, the query and the offset of its block row.
template <typename C>
__device__ __forceinline__ typename C::MaskRow mask_row_of(const AttentionParams& p,
                                                           const WorkTile& work, const Row& row) {
  if constexpr (C::kLargeTile) {
    const core::PackedMask mask = core::packed_mask(p);
    return static_cast<std::int32_t>(mask.row_offset(work.b, row.head, row.query) /
                                     (4 * mask.blocks));
  } else {
    const core::ScoreRow<float> score_row{p, work.b, row.head, row.query};
    if (!p.block_mask.given()) return score_row.mask_offset();
    const auto offset = score_row.block_mask_row() - p.block_mask.blocks;
    return std::int64_t{row.query} << 32 | static_cast<std::uint32_t>(offset);
  }
}

template <typename C>
__device__ __forceinline__ bool shows_key(const AttentionParams& p, typename C::MaskRow row,
                                          std::int32_t key) {
  if (!p.block_mask.given()) return p.mask[row + key * p.mask_strides.column] != 0;
  return p.block_mask.shows(p.block_mask.blocks + static_cast<std::uint32_t>(row),
                            static_cast<std::int32_t>(row >> 32), key);
}

/// Loads the bits of kKeys keys from first_key on. Packed words arrive during Q K^T.
template <typename C, int kKeys>
__device__ __forceinline__ void load_mask_bits(MaskBits<C>& bits, const SharedStorage<C>& s,
                                               const AttentionParams& p, const Thread<C>& t,
                                               std::int32_t first_key) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const typename C::MaskRow row = s.mask_rows[t.row(m, half)];
      if constexpr (C::kLargeTile) {
        const std::int32_t blocks = (p.kv_len + core::kMaskBlockKeys - 1) / core::kMaskBlockKeys;
        const auto* g_words = static_cast<const std::uint32_t*>(p.packed_mask);
        bits.row[m][half] = load_global(g_words + std::int64_t{row} * (4 * blocks) +
                                        (first_key / core::kMaskBlockKeys * 4 + t.lane % 4));
      } else {
        std::uint32_t word = 0;
#pragma unroll
        for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const std::int32_t key = first_key + t.column(n, C::reg_of(half, i));
            if (key < s.work.visible.end && shows_key<C>(p, row, key)) {
              word |= 1u << (2 * n + i);
            }
          }
        }
        bits.row[m][half] = word;
      }
    }
  }
}

/// Loads the bits of the warp's share of a KV tile, in kernels that do it before the wait for K.
template <typename C, bool kFastPath>
__device__ __forceinline__ void load_early_mask(MaskBits<C>& bits, const SharedStorage<C>& s,
                                                const AttentionParams& p, std::int32_t tile) {
  if constexpr (C::template kReadsMask<kFastPath> && C::kEarlyMask) {
    const Thread<C> t(threadIdx.x);
    if (p.has_mask()) {
      load_mask_bits<C, C::kWarpKeys>(bits, s, p, t, tile + t.warp_n * C::kWarpKeys);
    }
  }
}

/// Sets the scores of hidden keys to -inf.
template <typename C, int kKeys>
__device__ __forceinline__ void hide_masked_keys(AccS<C, kKeys>& acc_s, const MaskBits<C>& bits,
                                                 std::int32_t first_key) {
  constexpr int kBits = kKeys / C::kTileWidth * 2;
  constexpr std::uint32_t kAll = ~0u >> (32 - kBits);
  // A pass may begin in the middle of a packed word.
  const int shift = C::kLargeTile && kBits < 32 ? first_key % core::kMaskBlockKeys / 4 : 0;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t word = bits.row[m][half] >> shift;
      if (__all_sync(0xffffffffu, (word & kAll) == kAll)) continue;
#pragma unroll
      for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if ((word >> (2 * n + i) & 1u) == 0) {
            acc_s[m][n][C::reg_of(half, i)] = core::negative_infinity<float>();
          }
        }
      }
    }
  }
}

}  // namespace flashcore::cuda::sm80
