// The shape of an sm80 kernel and its derived properties. The kernel reads them, and so does the
// planner, which needs no CUDA.
#pragma once

namespace flashcore::core {

/// Large query tiles read a boolean mask as bits (core/packed_mask.h), and their fast path takes
/// rows of any dim. Small tiles read the mask itself: packing it would take as long as the call.
constexpr bool is_large_tile(int tile_q) { return tile_q >= 64; }

struct Sm80Traits {
  int head_dim;  // largest head_dim and v_dim
  int tile_q;
  int tile_k;
  int stages;     // of the K and V pipelines
  int warp_rows;  // 16; 32 halves the shared memory reads of K and V per MMA if registers allow;
                  // 8 swaps the operands of the MMAs (sm80/mma.cuh)
  int threads;
  int key_bytes = 2;  // of an element of K and V

  constexpr int warps_m() const { return tile_q / warp_rows; }
  constexpr int warps_n() const { return threads / 32 / warps_m(); }
  constexpr int warp_keys() const { return tile_k / warps_n(); }
  /// Each warp loads the keys it reads, so no CTA barrier is needed in the mainloop.
  constexpr bool warp_private_kv() const { return warps_m() == 1; }

  /// Registers of a thread's S and O accumulators, and of its Q fragments if they stay in
  /// registers.
  constexpr int accumulators() const { return accumulators(warp_keys()); }
  constexpr int accumulators(int keys) const { return warp_rows / 4 * (keys / 8 + head_dim / 8); }
  constexpr int query_registers() const { return warp_rows / 4 * (head_dim / 16); }

  /// Keys whose scores a warp computes at once: its whole share of a tile. Kernels with 8-bit K/V
  /// take fewer keys, because dequantization needs registers.
  constexpr int keys_per_pass() const {
    int keys = warp_keys();
    while (key_bytes == 1 && keys % 32 == 0 && accumulators(keys) > 160) keys /= 2;
    return keys;
  }

  /// Bytes of the Q, K and V tiles, or of the staged output that replaces them in the epilogue.
  constexpr int tile_bytes() const {
    const int tiles = 2 * head_dim * (tile_q + key_bytes * stages * tile_k);
    const int staged = 4 * warps_n() * tile_q * (head_dim + 8);
    return tiles > staged ? tiles : staged;
  }

  /// Resident threads of an SM, as shared memory and accumulators allow. More threads hide more
  /// latency.
  constexpr int sm_threads() const {
    const int most_for_512 = key_bytes == 1 ? 80 : 72;
    const int by_registers = accumulators() <= most_for_512 ? 512
                             : accumulators() <= 112        ? 384
                                                            : 256;
    const int by_memory = 222 * 1024 / (tile_bytes() + 6 * 1024) * threads;
    const int wanted = by_registers < by_memory ? by_registers : by_memory;
    return wanted < threads ? threads : wanted / threads * threads;
  }
  constexpr int blocks_per_sm() const { return sm_threads() / threads; }

  /// An SM has 64 Ki registers: 128, 168 or 255 for each thread.
  constexpr bool q_in_registers() const {
    const int room = sm_threads() > 384 ? 80 : sm_threads() > 256 ? 112 : 168;
    return accumulators() + query_registers() <= room;
  }
};

}  // namespace flashcore::core
