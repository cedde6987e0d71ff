// The shape of a tensor-core kernel and what follows from it: for the kernel, and for the planner,
// which needs no CUDA.
#pragma once

namespace flashcore::core {

struct Sm80Traits {
  int head_dim;  // head_dim and v_dim at most
  int tile_q;
  int tile_k;
  int stages;     // steps whose K and V are under way or there
  int warp_rows;  // 16 or 32: 32 halve what is read of K and V per product, where they fit
                  // registers. 8: keys, not rows, are the 16 of a product (few_rows.cuh)
  int threads;
  int key_bytes = 2;  // of an element of K and V

  constexpr int warps_m() const { return tile_q / warp_rows; }
  constexpr int warps_n() const { return threads / 32 / warps_m(); }
  constexpr int warp_keys() const { return tile_k / warps_n(); }
  /// Nobody else reads a warp's keys: it copies them itself, and no barrier holds it up.
  constexpr bool warp_private_kv() const { return warps_m() == 1; }

  /// Registers of a thread's scores and output, and of its queries if they are kept.
  constexpr int accumulators() const { return accumulators(warp_keys()); }
  constexpr int accumulators(int keys) const { return warp_rows / 4 * (keys / 8 + head_dim / 8); }
  constexpr int query_registers() const { return warp_rows / 4 * (head_dim / 16); }

  /// Keys whose scores a warp computes at once: all of its share or, where codes need registers to
  /// become operands, as many as leave room for that.
  constexpr int keys_per_pass() const {
    int keys = warp_keys();
    while (key_bytes == 1 && keys % 32 == 0 && accumulators(keys) > 160) keys /= 2;
    return keys;
  }

  /// Bytes of the tiles or, in their place at the end, of the results.
  constexpr int tile_bytes() const {
    const int tiles = 2 * head_dim * (tile_q + key_bytes * stages * tile_k);
    const int results = 4 * warps_n() * tile_q * (head_dim + 8);
    return tiles > results ? tiles : results;
  }

  /// Threads of an SM that shared memory and accumulators leave room for: more hide more latency.
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

  /// 64 Ki registers: 128, 168 or 255 a thread.
  constexpr bool q_in_registers() const {
    const int room = sm_threads() > 384 ? 80 : sm_threads() > 256 ? 112 : 168;
    return accumulators() + query_registers() <= room;
  }
};

}  // namespace flashcore::core
