// The shape of a Hopper kernel and its derived properties. The kernel reads them, and so does the
// planner, which needs no CUDA.
#pragma once

#include <cstdint>

#include "core/tile_scheduler.h"

namespace flashcore::core {

inline constexpr int kSm90SharedBytes = 227 * 1024;  // opt-in limit of a CTA
inline constexpr int kSm90MaxHeadDim = 256;

struct Sm90Traits {
  int head_dim;  // largest head_dim and v_dim
  int tile_q;    // 64 rows for each consumer warpgroup
  int tile_k;
  int stages;  // of the K and V pipelines
  int element_bytes = 2;

  constexpr bool is_fp8() const { return element_bytes == 1; }
  constexpr int consumers() const { return tile_q / kQTileRows; }
  constexpr int threads() const { return 128 * (1 + consumers()); }
  /// Bytes of a tile of Q, K or V, in panels of 128 bytes.
  constexpr int tile_bytes(int rows) const {
    return rows * 128 * ((head_dim * element_bytes + 127) / 128);
  }
  /// TMA brings fp8 V to a staging buffer, from which warps transpose it into the V pipeline.
  constexpr int v_staging_stages() const { return is_fp8() ? 2 : 0; }
  constexpr int transposed_bytes() const { return head_dim * 128 * ((tile_k + 127) / 128); }
  constexpr int transposers() const { return is_fp8() ? 2 : 0; }  // warps
  /// Warps that load paged K and V: those of the producer warpgroup that have no other role.
  constexpr int page_producers() const { return is_fp8() ? 1 : 3; }
  /// They copy rows by cp.async, not in TMA boxes, if a box would have few. cp.async fills no
  /// columns past the head dim with zeros.
  constexpr bool gathers_pages() const { return page_producers() > 1 && consumers() < 3; }
  constexpr bool gathers_pages(int box_rows, std::int64_t dim, std::int64_t v_dim) const {
    return gathers_pages() && box_rows < 4 && dim == head_dim && v_dim == head_dim;
  }
  constexpr int kv_bytes() const {
    return stages * (tile_bytes(tile_k) + (is_fp8() ? transposed_bytes() : tile_bytes(tile_k))) +
           v_staging_stages() * tile_bytes(tile_k);
  }
  /// 64-row Q tiles that fit beside K and V, at most those of two work tiles. Space for more than
  /// one work tile hides the latency of the next Q load.
  constexpr int q_stages() const {
    constexpr int kOther = 2048;  // mbarriers and the tile queue
    const int fit = (kSm90SharedBytes - kOther - kv_bytes()) / tile_bytes(kQTileRows);
    return fit < 2 * consumers() ? fit : 2 * consumers();
  }
  /// Q tiles that arrive at one barrier. If the Q tiles of two work tiles do not fit, each one is
  /// loaded as soon as a warpgroup has released its slot. fp8 consumers do not run ahead into the
  /// next work tile, so they would gain nothing from single loads.
  constexpr int q_tiles_per_stage() const {
    return is_fp8() || q_stages() == 2 * consumers() ? consumers() : 1;
  }
  constexpr int q_barriers() const {  // see QStage
    return q_tiles_per_stage() > 1 ? q_stages() / q_tiles_per_stage() : 2 * consumers();
  }
  /// fp8 consumers at head_dim 256 issue the next step's Q K^T at the end of this one.
  constexpr bool issues_qk_ahead() const { return is_fp8() && head_dim == 256; }
  /// PackGQA and the tail split are compiled into one kernel only; they slow the others down.
  constexpr bool packs_gqa() const { return !is_fp8() && head_dim == 128 && tile_k == 160; }
  /// A lane's bits of a row of a packed mask fill one word (core/packed_mask.h).
  constexpr bool takes_mask() const { return !is_fp8() && tile_k <= 128; }
  /// Three consumers have too few registers, and larger tiles too little memory for a bias.
  constexpr bool takes_bias() const { return takes_mask() && consumers() < 3; }
  /// Shared memory of a step's 16-bit bias beside the `used` bytes of the kernel; 0 if it does not
  /// fit (cuda/sm90/bias.cuh).
  constexpr int staged_bias_bytes(int used) const {
    const int bytes = 2 * tile_q * tile_k;
    return used + bytes <= kSm90SharedBytes ? bytes : 0;
  }
  /// Registers are left for faster score modifications.
  constexpr bool has_spare_registers() const {
    return !is_fp8() && (head_dim == 64 || head_dim == 128 || head_dim == 256);
  }
  /// ALiBi in units of the slope (cuda/sm90/alibi.cuh).
  constexpr bool adds_alibi() const { return has_spare_registers() && consumers() < 3; }
  /// The softcap of small scores is a polynomial in the exponent (cuda/sm90/softcap.cuh). In one
  /// kernel with it, ALiBi takes 5 % longer at 160 keys per step: these calls have a kernel each.
  constexpr bool caps_exponents() const {
    return has_spare_registers() && consumers() < 3 &&
           (tile_k <= 128 || (packs_gqa() && tile_q == 128));
  }
  constexpr bool caps_in_own_kernel() const { return caps_exponents() && tile_k > 128; }
  /// Workspace of a tail split: the f32 output and two numbers for each row.
  constexpr int partial_bytes() const { return tile_q * (head_dim + 2) * 4; }
  /// Registers of a thread after setmaxnreg: the producer warpgroup gives some to the consumers.
  constexpr int consumer_registers() const { return consumers() == 3 ? 160 : 232; }
  constexpr int producer_registers() const { return consumers() == 3 ? 32 : 40; }
};

/// The stage of a warpgroup's Q tile. Q tiles pass through their slots in turn.
///
/// Q tiles that are loaded together share a barrier. For single loads each warpgroup has two
/// barriers of its own and alternates between them, so that it waits for every phase of its
/// barriers. A shared barrier would be wrong: a wait compares the phase parity only, so a warpgroup
/// one tile ahead could mistake an earlier phase for its own.
template <int kConsumers, int kSlots, int kTogether>
struct QStage {
  static constexpr int kOwnBarriers = 2;
  static constexpr int kBarriers = kTogether == 1 ? kConsumers * kOwnBarriers : kSlots / kTogether;
  static_assert(kTogether == 1 || (kTogether == kConsumers && kSlots % kConsumers == 0));
  static_assert(kSlots >= kConsumers && kSlots <= kOwnBarriers * kConsumers);
  std::uint32_t count;  // earlier work tiles of this CTA
  std::int32_t group;   // warpgroup

  FLASHCORE_HD constexpr std::uint32_t stage() const {  // index of the barrier pair
    return kTogether > 1 ? count % kBarriers
                         : static_cast<std::uint32_t>(group) * kOwnBarriers + count % kOwnBarriers;
  }
  FLASHCORE_HD constexpr std::uint32_t round() const {  // earlier uses of the barriers
    return count / (kTogether > 1 ? kBarriers : kOwnBarriers);
  }
  FLASHCORE_HD constexpr std::uint32_t slot() const {  // of shared memory
    return kTogether > 1 ? stage() * kTogether + static_cast<std::uint32_t>(group)
                         : turn() % kSlots;
  }

  /// The producer's wait for the slot: until the Q tile in it is released.
  struct Emptied {
    std::uint32_t barrier, times;
    FLASHCORE_HD constexpr std::uint32_t stage() const { return barrier; }
    FLASHCORE_HD constexpr std::uint32_t round() const { return times; }
  };
  FLASHCORE_HD constexpr Emptied emptied() const {
    if (kTogether > 1 || turn() < kSlots) return {stage(), round()};
    const std::uint32_t before = turn() - kSlots;
    const QStage previous{before / kConsumers, static_cast<std::int32_t>(before % kConsumers)};
    return {previous.stage(), previous.round() + 1};
  }

 private:
  FLASHCORE_HD constexpr std::uint32_t turn() const {
    return count * kConsumers + static_cast<std::uint32_t>(group);
  }
};

}  // namespace flashcore::core
