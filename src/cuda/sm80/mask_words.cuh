// The bits of a boolean mask or block mask in small query tiles, in words of 32 keys. They are made
// from the mask itself: packing it before the call would take as long as the call.
#pragma once

#include "core/packed_mask.h"
#include "core/score.h"
#include "cuda/sm80/load.cuh"

namespace flashcore::cuda::sm80 {

/// Words of a row, for the keys of a pass: bit j of word w is key 32 w + j.
template <typename C>
using MaskWords = std::uint32_t[C::kMaskWords];

/// The words of a block mask. A word lies within one block. Bits past the pass may be set.
template <typename C>
__device__ __forceinline__ void load_block_words(MaskWords<C>& words, const AttentionParams& p,
                                                 std::int64_t row, std::int32_t first_key) {
  const std::int32_t* g_entries = p.block_mask.blocks + static_cast<std::uint32_t>(row);
  const auto query = static_cast<std::int32_t>(row >> 32);
#pragma unroll
  for (int w = 0; w < C::kMaskWords; ++w) {
    const std::int32_t key = first_key + 32 * w;
    words[w] = 0;
    if (key < p.kv_len) {
      words[w] = p.block_mask.word(p.block_mask.entry(g_entries, key), query, key) >> (key % 32);
    }
  }
}

/// ORs over the lanes that share a row.
template <typename C>
__device__ __forceinline__ std::uint32_t row_reduce_or(std::uint32_t x) {
#pragma unroll
  for (int offset = C::kSwapAB ? 4 : 1; offset < (C::kSwapAB ? 32 : 4); offset *= 2) {
    x |= __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}

/// The words of a mask of bytes. The lanes of a row read the bytes of adjacent keys, four at a time
/// if they are aligned, and exchange the bits.
template <typename C, int kKeys>
__device__ __forceinline__ void load_byte_words(MaskWords<C>& words, const AttentionParams& p,
                                                std::int64_t row, const Thread<C>& t,
                                                std::int32_t first_key) {
  constexpr int kOwn = kKeys / C::kLanesOfRow;  // keys of a lane
  static_assert(kOwn % 4 == 0 && kOwn <= 32);
  const int first = kOwn * t.row_lane();
  const std::int32_t key = first_key + first;
  const std::int64_t stride = p.mask_strides.column;
  const std::uint8_t* g_own = p.mask + row + key * stride;
  const bool aligned = stride == 1 && key + kOwn <= p.kv_len &&
                       reinterpret_cast<std::uintptr_t>(g_own) % sizeof(std::uint32_t) == 0;
  std::uint32_t bytes[kOwn / 4];
  if (aligned) {
#pragma unroll
    for (int i = 0; i < kOwn / 4; ++i) bytes[i] = reinterpret_cast<const std::uint32_t*>(g_own)[i];
  } else {
#pragma unroll
    for (int i = 0; i < kOwn / 4; ++i) {
      bytes[i] = gather_word(g_own + 4 * i * stride, p.kv_len - key - 4 * i, stride);
    }
  }
  std::uint32_t own = 0;
#pragma unroll
  for (int i = 0; i < kOwn / 4; ++i) own |= core::nonzero_bytes(bytes[i]) << (4 * i);
#pragma unroll
  for (int w = 0; w < C::kMaskWords; ++w) {
    words[w] = row_reduce_or<C>(first / 32 == w ? own << (first % 32) : 0u);
  }
}

template <typename C, int kKeys>
__device__ __forceinline__ void load_mask_words(MaskWords<C>& words, const AttentionParams& p,
                                                std::int64_t row, const Thread<C>& t,
                                                std::int32_t first_key) {
  if (p.block_mask.given()) {
    load_block_words<C>(words, p, row, first_key);
  } else {
    load_byte_words<C, kKeys>(words, p, row, t, first_key);
  }
}

}  // namespace flashcore::cuda::sm80
