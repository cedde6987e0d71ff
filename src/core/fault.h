// Fault injection. In code compiled with FLASHCORE_FAULTS, the environment variable
// FLASHCORE_FAULT=n injects fault n at run time, to show that the checks detect it. In all other
// code is() is constant false and costs no instruction.
#pragma once

#include "core/config.h"

namespace flashcore::core {

enum class InjectedFault : int {
  none = 0,
  causal_off_by_one = 1,       // a query sees the key after its own
  window_off_by_one = 2,       // the window's left edge is one key too far right
  scale_ignored = 3,           // scores are not multiplied by scale
  rescale_forgotten = 4,       // the accumulator is not rescaled to a new maximum
  tail_key_dropped = 5,        // the last key of a sequence is not read
  gqa_map_wrong = 6,           // query head h reads KV head h mod kv_heads
  softcap_after_bias = 7,      // bias is added before the cap
  alibi_signed = 8,            // ALiBi without the absolute value
  sink_in_every_split = 9,     // each split adds the sink, not only the combine step
  combine_double_counts = 10,  // partials are weighted by their sums once more
  lse_in_base_2 = 11,          // LSE is not converted to the natural logarithm
  head_dim_truncated = 12,     // the last column of q and k is ignored
  row_not_written = 13,        // the last query row is not stored
  mask_batch_ignored = 14,     // all batches use the boolean mask of batch 0
  empty_row_is_nan = 15,       // a row that sees no key divides by zero
  pages_of_first = 16,         // all sequences read the pages of the first one
  scale_of_first_block = 17,   // every block of rows uses the first block's scale
  half_the_codes = 18,         // codes of 8-bit q, k and v lose their top bit
  // Synchronisation of a Hopper CTA (core/sm90_roles.h).
  arrival_missing = 19,       // a warpgroup that skips a K tile does not release it
  arrivals_too_few = 20,      // k_empty ends a phase one warp too early
  parity_wrong = 21,          // a consumer waits for the queries of an earlier tile
  turn_skipped = 22,          // a warpgroup that skips a K tile keeps its ping-pong turn
  stage_released_twice = 23,  // the last V tile of a work tile is released twice
  // Synchronisation of CTAs that combine KV splits (core/sm80_roles.h).
  expected_bytes_short = 24,  // a cluster buffer expects one slot fewer than it gets
  sent_before_open = 25,      // a CTA does not wait for its peers' buffers
  counted_wrong = 26,         // the second to last CTA combines
  counter_left = 27,          // the counter wraps one CTA too late
  // Termination of a kernel.
  never_ends = 30,  // the kernel spins if a sequence has 3, 10, 17, ... queries
  // Gradients.
  delta_ignored = 31,            // dS is P times dP
  delta_of_next_row = 32,        // dS uses the delta of the row below
  dlse_ignored = 33,             // the gradient of the LSE does not reach delta
  dq_scale_missing = 34,         // dq is not multiplied by scale
  dk_scale_twice = 35,           // dk is multiplied by scale twice
  softcap_slope_ignored = 36,    // dZ is dS
  bwd_mask_ignored = 37,         // causal masks and windows are not applied again
  last_query_tile_dropped = 38,  // dk and dv lack the last query tile
  group_last_head_only = 39,     // dk and dv sum over the last head of a group only
  dq_tile_twice = 40,            // the first KV tile is added to dq twice
  dsinks_sign_wrong = 41,        // dsinks has the wrong sign
  dbias_first_batch = 42,        // a repeated dbias sums over the first batch entry only
  empty_row_unguarded = 43,      // an LSE of -inf is used as it is
  dk_tail_unwritten = 44,        // dk and dv keep their values past seqused_k
};

#if defined(FLASHCORE_FAULTS)
struct Fault {
  int id = 0;
  FLASHCORE_HD constexpr bool is(InjectedFault fault) const {
    return id == static_cast<int>(fault);
  }
};
#else
struct Fault {
  FLASHCORE_HD constexpr bool is(InjectedFault) const { return false; }
};
#endif

/// Injects never_ends. Every thread of a kernel calls it first.
#if defined(FLASHCORE_FAULTS)
FLASHCORE_HD void spin_if_injected(Fault fault, long long q_len) {
  if (!fault.is(InjectedFault::never_ends) || q_len % 7 != 3) return;
  for (;;) asm volatile("" ::: "memory");  // nvcc deletes loops over volatiles
}
#else
FLASHCORE_HD void spin_if_injected(Fault, long long) {}
#endif

}  // namespace flashcore::core
