// A boolean mask on the scores of a step, as bits of the thread's rows. Large query tiles read bits
// that a kernel of its own has packed (core/packed_mask.h), small ones make them (mask_words.cuh).
#pragma once

#include "cuda/primitives/memory.cuh"
#include "cuda/sm80/mask_words.cuh"

namespace flashcore::cuda::sm80 {

/// The bits of row (m, half). Small tiles: see MaskWords. Large tiles: bit 2 n + i is the key of
/// acc_s[m][n][reg_of(half, i)].
template <typename C>
struct MaskBits {
  MaskWords<C> row[C::kRowTiles][2];
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
        bits.row[m][half][0] = load_global(g_words + std::int64_t{row} * (4 * blocks) +
                                           (first_key / core::kMaskBlockKeys * 4 + t.lane % 4));
      } else {
        load_mask_words<C, kKeys>(bits.row[m][half], p, row, t, first_key);
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

/// The bits of kKeys keys in each word of a row.
template <int kBits>
inline constexpr std::uint32_t kAllBits = ~0u >> (kBits < 32 ? 32 - kBits : 0);

/// False if the mask hides all kKeys keys from all rows of the warp: the step then changes nothing.
/// Large tiles do not ask.
template <typename C, bool kFastPath, int kKeys>
__device__ __forceinline__ bool shows_any_key(const AttentionParams& p, const MaskBits<C>& bits) {
  if constexpr (C::template kReadsMask<kFastPath> && !C::kLargeTile) {
    if (!p.has_mask()) return true;
    std::uint32_t any = 0;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int w = 0; w < C::kMaskWords; ++w) any |= bits.row[m][0][w] | bits.row[m][1][w];
    }
    return __any_sync(0xffffffffu, (any & kAllBits<kKeys>) != 0);
  }
  return true;
}

/// Sets the scores of hidden keys to -inf.
template <typename C, int kKeys>
__device__ __forceinline__ void hide_masked_keys(AccS<C, kKeys>& acc_s, const MaskBits<C>& bits,
                                                 const Thread<C>& t, std::int32_t first_key) {
  constexpr int kBits = C::kLargeTile ? kKeys / C::kTileWidth * 2 : kKeys;
  // Large tiles: a pass may begin in the middle of a packed word. Small tiles: the thread's first
  // key.
  const int shift = !C::kLargeTile ? t.column(0, C::reg_of(0, 0))
                    : kBits < 32   ? first_key % core::kMaskBlockKeys / 4
                                   : 0;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      MaskWords<C> words;
      std::uint32_t all = ~0u;
#pragma unroll
      for (int w = 0; w < C::kMaskWords; ++w) {
        words[w] = bits.row[m][half][w];
        if (C::kLargeTile) words[w] >>= shift;
        all &= words[w];
      }
      if (__all_sync(0xffffffffu, (all & kAllBits<kBits>) == kAllBits<kBits>)) continue;
      if (!C::kLargeTile) {
#pragma unroll
        for (std::uint32_t& word : words) word >>= shift;
      }
#pragma unroll
      for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int bit = C::kLargeTile ? 2 * n + i : C::kTileWidth * n + C::column_step(i);
          if ((words[bit / 32] >> bit % 32 & 1u) == 0) {
            acc_s[m][n][C::reg_of(half, i)] = core::negative_infinity<float>();
          }
        }
      }
    }
  }
}

}  // namespace flashcore::cuda::sm80
