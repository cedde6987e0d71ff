// Masks by blocks of queries and keys: documents in a packed row, prefix-LM, sliding windows with
// global tokens, trees, and any block pattern. Hidden blocks cost no work on kernels that skip
// them; explain() says how many.
//
// A block mask is two tensors of a call, Tensors::mask_blocks and mask_bits (problem.h). Memory is
// 4 bytes per block plus the bits of the distinct mixed blocks. It combines with causal, windows
// and lengths by a logical "and", as a boolean mask does.
#pragma once

#include <string>
#include <vector>

#include "flashcore/plan.h"
#include "flashcore/problem.h"

namespace flashcore {

enum class MaskPattern : std::int32_t {
  /// A query sees the keys of its own document. values: i32 [kv_len] or [batch, kv_len], the
  /// document of each key; a negative document sees and shows nothing.
  documents = 0,
  /// A query sees the prefix and all keys up to its own position. values: i32 [batch], the lengths
  /// of the prefixes.
  prefix_lm = 1,
  /// A query sees window_left keys before and window_right keys after its position (-1: all) and
  /// the first global_tokens keys. The first global_tokens positions see every key.
  sliding_window = 2,
  /// The last q_len keys are tokens of a tree. A token sees itself, its ancestors and all keys
  /// before the tree. values: i32 [q_len] or [batch, q_len], the parent of each token, which comes
  /// before it; -1: none.
  tree = 3,
  /// values: boolean [batch|1, q_heads|1, q_len, kv_len].
  dense = 4,
  /// Block sparse rows, every stored block visible. values: i32 [batch|1, q_heads|1, q_blocks + 1],
  /// the offsets of the block rows in columns: i32 [stored blocks].
  bsr = 5,
};

/// The description of a block mask. All tensors are in host memory. Query i has the position of key
/// i + kv_len - q_len, as in a causal call.
struct BlockMaskSpec {
  MaskPattern pattern = MaskPattern::documents;
  std::int64_t q_len = 0, kv_len = 0;
  std::int64_t block_q = 128, block_k = 128;  ///< powers of two from 16 (q), 32 (k) to 1024
  TensorView values{}, columns{};
  std::int64_t window_left = -1, window_right = -1, global_tokens = 0;
};

/// A block mask in host memory.
struct BlockMask {
  std::int64_t batch = 1, heads = 1;  ///< 1: for all sequences, for all heads
  std::int64_t q_len = 0, kv_len = 0, block_q = 0, block_k = 0;
  std::vector<std::int32_t> blocks;  ///< [batch, heads, q_blocks, k_blocks]
  std::vector<std::int32_t> bits;    ///< [tiles, block_q, block_k / 32]

  std::int64_t q_blocks() const noexcept { return (q_len + block_q - 1) / block_q; }
  std::int64_t k_blocks() const noexcept { return (kv_len + block_k - 1) / block_k; }
  std::int64_t tiles() const noexcept {
    return static_cast<std::int64_t>(bits.size()) / (block_q * (block_k / 32));
  }
  /// Views for Tensors::mask_blocks and mask_bits.
  TensorView blocks_view() const noexcept {
    return view(blocks.data(), DType::i32, {batch, heads, q_blocks(), k_blocks()});
  }
  TensorView bits_view() const noexcept {
    return view(bits.data(), DType::i32, {tiles(), block_q, block_k / 32});
  }
};

FLASHCORE_API Result<BlockMask> make_block_mask(const BlockMaskSpec& spec) noexcept;

/// Writes the mask to `dense`, boolean [batch|1, q_heads|1, q_len, kv_len]. Host memory.
FLASHCORE_API Status expand_block_mask(const TensorView& mask_blocks, const TensorView& mask_bits,
                                       const TensorView& dense) noexcept;

/// explain(), and for a block mask a line with the share of KV tiles that the kernel skips. Copies
/// mask_blocks from a GPU. Variable lengths count with their capacities.
FLASHCORE_API std::string explain(const Plan& plan, const Tensors& tensors);

}  // namespace flashcore
