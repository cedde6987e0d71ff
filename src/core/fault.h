// Fault injection. Code compiled with FLASHCORE_FAULTS breaks one place, chosen at run time by the
// environment variable FLASHCORE_FAULT=n, to show that the checks catch it. In all other code is()
// is a constant false and leaves no instruction behind.
#pragma once

#include "core/config.h"

namespace flashcore::core {

enum class InjectedFault : int {
  none = 0,
  causal_off_by_one = 1,       // a query sees the key after its own
  window_off_by_one = 2,       // the window's left edge is one key too far right
  scale_ignored = 3,           // scores are not multiplied by scale
  rescale_forgotten = 4,       // the accumulator keeps its old maximum
  tail_key_dropped = 5,        // the last key of a sequence is not read
  gqa_map_wrong = 6,           // query head h reads KV head h mod kv_heads
  softcap_after_bias = 7,      // bias is added before the cap
  alibi_signed = 8,            // ALiBi without the absolute value
  sink_in_every_split = 9,     // each split adds the sink, not only the combine step
  combine_double_counts = 10,  // partials are weighted by their sums once more
  lse_in_base_2 = 11,          // LSE is not converted to the natural logarithm
  head_dim_truncated = 12,     // the last column of q and k is left out
  row_not_written = 13,        // the last query row keeps its old output
  mask_batch_ignored = 14,     // the boolean mask of batch 0 serves all
  empty_row_is_nan = 15,       // a row that sees no key divides by zero
  pages_of_first = 16,         // all sequences read the first one's pages
  scale_of_first_block = 17,   // every block of rows uses the first block's scale
  half_the_codes = 18,         // 8-bit codes from 128 on lose their top bit
  // Synchronisation of a Hopper CTA (core/sm90_roles.h).
  arrival_missing = 19,       // a warpgroup that skips a K tile does not release it
  arrivals_too_few = 20,      // k_empty ends a phase one warp too early
  parity_wrong = 21,          // a consumer waits for the queries of an earlier tile
  turn_skipped = 22,          // a warpgroup that skips a K tile keeps its turn
  stage_released_twice = 23,  // the last V tile of a work tile is released twice
  // Synchronisation of CTAs that combine KV splits (core/sm80_roles.h).
  expected_bytes_short = 24,  // a cluster buffer expects one slot fewer than it gets
  sent_before_open = 25,      // a CTA does not wait for its peers' buffers
  counted_wrong = 26,         // the last CTA but one combines
  counter_left = 27,          // the counter wraps one CTA too late
  // A kernel as a whole.
  never_ends = 30,  // it spins where a sequence has 3, 10, 17, ... queries
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

/// Injects never_ends. A kernel calls it first, on all its threads.
#if defined(FLASHCORE_FAULTS)
FLASHCORE_HD void spin_if_injected(Fault fault, long long q_len) {
  if (!fault.is(InjectedFault::never_ends) || q_len % 7 != 3) return;
  for (;;) asm volatile("" ::: "memory");  // nvcc deletes loops over volatiles
}
#else
FLASHCORE_HD void spin_if_injected(Fault, long long) {}
#endif

}  // namespace flashcore::core
