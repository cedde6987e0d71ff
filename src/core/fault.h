// Planted bugs. A build with -DFLASHCORE_FAULTS=ON breaks one place, chosen at run time by the
// environment variable FLASHCORE_FAULT=n, to show that the checks catch it. In every other build
// is() is a constant false and nothing of this remains.
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
  sink_in_every_split = 9,     // each split adds the sink, not only the merge
  combine_double_counts = 10,  // partials are weighted by their sums once more
  lse_in_base_2 = 11,          // LSE is not converted to the natural logarithm
  head_dim_truncated = 12,     // the last column of q and k is left out
  row_not_written = 13,        // the last query row keeps its old output
  mask_batch_ignored = 14,     // the boolean mask of batch 0 serves all
  empty_row_is_nan = 15,       // a row that sees no key divides by zero
  pages_of_first = 16,         // all sequences read the first one's pages
  scale_of_first_block = 17,   // codes of every block of rows are scaled as the first block's
  half_the_codes = 18,         // codes from 128 on are read without their top bit
  // Of the synchronisation in a Hopper CTA (core/sm90_roles.h).
  arrival_missing = 19,       // a warpgroup that skips a K tile does not give it back
  arrivals_too_few = 20,      // k_empty ends a phase one warp too early
  parity_wrong = 21,          // a consumer waits for the queries of an earlier item
  turn_skipped = 22,          // a warpgroup that skips a K tile keeps its turn
  stage_released_twice = 23,  // an item's last V tile is given back twice
  // Of the CTAs that join split KV (core/sm80_roles.h).
  expected_bytes_short = 24,  // an inbox expects one piece fewer than it is sent
  sent_before_open = 25,      // a CTA does not wait for the others' inboxes
  counted_wrong = 26,         // the last CTA but one joins
  counter_left = 27,          // the counter wraps one CTA too late
  // Of a kernel as a whole.
  never_ends = 30,  // it spins where a sequence has 3, 10, 17, ... queries
};

#if defined(FLASHCORE_FAULTS)
struct Fault {
  int id = 0;
  FLASHCORE_HD constexpr bool is(InjectedFault bug) const { return id == static_cast<int>(bug); }
};
#else
struct Fault {
  FLASHCORE_HD constexpr bool is(InjectedFault) const { return false; }
};
#endif

/// The bug never_ends. A kernel calls it before anything else, on all its threads.
#if defined(FLASHCORE_FAULTS)
FLASHCORE_HD void spin_if_planted(Fault fault, long long q_len) {
  if (!fault.is(InjectedFault::never_ends) || q_len % 7 != 3) return;
  for (;;) asm volatile("" ::: "memory");  // volatile variables do not keep nvcc from leaving
}
#else
FLASHCORE_HD void spin_if_planted(Fault, long long) {}
#endif

}  // namespace flashcore::core
