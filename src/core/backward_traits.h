// Shapes of CUDA kernels for gradients. The kernels read them, and so does the planner, which needs
// no CUDA.
#pragma once

namespace flashcore::core {

/// Keys of a dbias tile of a simt kernel (BackwardParams::dbias_keys).
inline constexpr int kDbiasKeys = 32;

/// The shape of an sm80 kernel and its derived properties.
struct Sm80BackwardTraits {
  int head_dim;  // largest head_dim and v_dim
  int threads;

  /// Queries that a step multiplies with a KV tile. Tiles of more columns leave shared memory for
  /// fewer rows.
  constexpr int query_step() const { return head_dim <= 128 ? 64 : 32; }
  /// Keys that a step multiplies with a query tile.
  constexpr int key_step() const { return 32; }
  /// True if each warp has 32 query rows of a query tile, and all columns of their dq.
  constexpr bool weights_in_registers() const { return head_dim <= 128; }
  /// 512 threads per SM with 128 registers, or 256 with 255.
  constexpr int blocks_per_sm() const { return 256 / threads; }
};

}  // namespace flashcore::core
