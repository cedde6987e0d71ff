// A boolean mask or block mask as bits, for the kernels with large query tiles. A kernel of its own
// packs it before the call (cuda/common/pack_mask.cu).
//
// A row of 128 keys is four words, one for each lane of a quad: bit 2 n + i of word c is key
// 8 n + 2 c + i, which is register 4 n + 2 half + i of the accumulator of S (mma_layout.h). Dims
// along which the mask is broadcast have extent 1.
#pragma once

#include "core/block_mask.h"
#include "core/mask.h"
#include "core/params.h"
#include "core/strides.h"

namespace flashcore::core {

inline constexpr int kMaskBlockKeys = 128;    // keys of four words
inline constexpr int kMaskRangeRows = 16;     // rows with a common key range
inline constexpr int kMaskPaddingRows = 192;  // of the largest query tile

/// The key of a bit of one of a block's four words.
FLASHCORE_HD constexpr std::int32_t mask_key(std::int32_t block, int word, int bit) {
  return block * kMaskBlockKeys + bit / 2 * 8 + 2 * word + bit % 2;
}

/// Four bytes of a boolean mask as four bits: bit j is set if byte j is not 0.
FLASHCORE_HD constexpr std::uint32_t nonzero_bytes(std::uint32_t bytes) {
  constexpr std::uint32_t kLow = 0x7f7f7f7fu;
  const std::uint32_t top = (((bytes & kLow) + kLow) | bytes) & ~kLow;  // of bytes that are not 0
  return (top >> 7) * 0x10204080u >> 28;
}

struct PackedMask {
  // [batch, heads, rows, blocks, 4] and kMaskPaddingRows rows of any content, which a tile reads
  // past the last query. Null: no mask.
  std::uint32_t* words;
  KeyRange* ranges;  // [batch, heads, row groups]: whole blocks that contain all visible keys
  std::int32_t batch, heads, rows, row_groups, blocks;  // extents; 1 if broadcast

  FLASHCORE_HD constexpr std::int64_t plane(std::int32_t b, std::int32_t h) const {
    return static_cast<std::int64_t>(batch > 1 ? b : 0) * heads + (heads > 1 ? h : 0);
  }
  FLASHCORE_HD constexpr std::int64_t row_offset(std::int32_t b, std::int32_t h,
                                                 std::int32_t row) const {
    return (plane(b, h) * rows + (rows > 1 ? row : 0)) * blocks * 4;
  }
  FLASHCORE_HD constexpr std::int64_t word_count() const {
    const std::int64_t all_rows = static_cast<std::int64_t>(batch) * heads * rows;
    return (all_rows + (rows > 1 ? kMaskPaddingRows : 0)) * blocks * 4;
  }
  FLASHCORE_HD constexpr std::int64_t range_count() const {
    return static_cast<std::int64_t>(batch) * heads * row_groups;
  }
};

inline constexpr std::int64_t kEveryRow = 1;  // row stride of a block mask: rows are not repeated

/// The extents of a packed mask with these strides (bytes; 0: broadcast). At least one block.
FLASHCORE_HD constexpr PackedMask packed_mask_of(std::int64_t batch_stride,
                                                 std::int64_t head_stride, std::int64_t row_stride,
                                                 std::int32_t batch, std::int32_t heads,
                                                 std::int32_t q_len, std::int32_t kv_len) {
  PackedMask mask{};
  mask.batch = batch_stride == 0 ? 1 : batch;
  mask.heads = head_stride == 0 ? 1 : heads;
  mask.rows = row_stride == 0 ? 1 : q_len;
  mask.row_groups = (mask.rows + kMaskRangeRows - 1) / kMaskRangeRows;
  mask.blocks = kv_len > 0 ? (kv_len + kMaskBlockKeys - 1) / kMaskBlockKeys : 1;
  return mask;
}

/// The packed mask of a call, in its workspace; without words if the call has no mask.
FLASHCORE_HD PackedMask packed_mask(const AttentionParams& call) {
  if (!call.has_mask()) return {};
  const bool by_blocks = call.block_mask.given();
  const Strides& strides = by_blocks ? call.block_mask.strides : call.mask_strides;
  PackedMask mask = packed_mask_of(strides.batch, strides.head, by_blocks ? kEveryRow : strides.row,
                                   call.batch, call.q_heads, call.q_len, call.kv_len);
  mask.words = static_cast<std::uint32_t*>(call.packed_mask);
  // After the words, at the workspace's alignment: plan/workspace.cc.
  const std::int64_t words = (mask.word_count() + 63) / 64 * 64;
  mask.ranges = reinterpret_cast<KeyRange*>(mask.words + words);
  return mask;
}

/// Whole blocks that contain every key visible to queries [first, first + count) of a head.
FLASHCORE_HD KeyRange visible_blocks(const PackedMask& mask, std::int32_t b, std::int32_t h,
                                     std::int32_t first, std::int32_t count) {
  const KeyRange* ranges = mask.ranges + mask.plane(b, h) * mask.row_groups;
  std::int32_t group = mask.rows > 1 ? first / kMaskRangeRows : 0;
  const std::int32_t last = mask.rows > 1 ? (first + count - 1) / kMaskRangeRows : 0;
  KeyRange all = ranges[group];
  FLASHCORE_LOOP
  while (++group <= last) {
    const KeyRange range = ranges[group];
    if (range.begin < all.begin) all.begin = range.begin;
    if (range.end > all.end) all.end = range.end;
  }
  return all;
}

/// Arguments of the packing kernels. One of the masks is given.
struct PackMaskParams {
  const std::uint8_t* mask;
  Strides strides;
  BlockMask block_mask;
  std::int32_t kv_len;
  PackedMask packed;
};

}  // namespace flashcore::core
