// Synchronisation of sm80 CTAs that combine split KV. A role is a template over the type of the
// warp that runs it: the kernel's warp (cuda/sm80/combine.cuh, cluster_combine.cuh,
// cluster_combine_warps.cuh) sends and adds numbers, the model's (tests/protocol) checks every
// access. Both run the same code.
//
// CTAs of a cluster (core/cluster_buffer.h):
//   open_buffer          every warp, before its mainloop; then
//   combine_from_ctas    after the mainloop if CTAs send their results, or
//   combine_from_warps   if warps send theirs
// Without a cluster:
//   combine_in_last_cta  the last CTA combines the partial results in the workspace
#pragma once

#include "core/cluster_buffer.h"
#include "core/fast_divmod.h"
#include "core/fault.h"

namespace flashcore::core {

/// Splits that hold keys of a sequence, and at least one. Only these are combined.
FLASHCORE_HD constexpr std::int32_t splits_with_keys(std::int32_t kv_len,
                                                     const FastDivmod& split_keys_divmod) {
  return div((kv_len > 1 ? kv_len : 1) - 1, split_keys_divmod) + 1;
}

/// True if a CTA has a split to compute. Other CTAs do not wait for a CTA without one.
FLASHCORE_HD constexpr bool has_split(std::int32_t rows, std::int32_t split, std::int32_t splits) {
  return rows > 0 && split < splits;
}

template <BufferBarrier kBarrier, typename Warp>
FLASHCORE_ROLE void expect_bytes(Warp& warp, int vec4s) {
  warp.template arrive_expect_tx<kBarrier>(
      expected_bytes<kBarrier>(vec4s, Warp::kRowVec4s, warp.splits(), Warp::kWarpsN,
                               warp.has_fault(InjectedFault::expected_bytes_short)));
}

/// Opens the CTA's buffer and waits until all buffers of the cluster are open. The loads of the
/// first tiles hide the wait.
template <typename Warp>
FLASHCORE_ROLE void open_buffer(Warp& warp, bool from_warps) {
  if constexpr (Warp::kSwapAB) {
    if (warp.has_first_thread() && from_warps) {
      const int vec4s = vec4s_to_combine(warp.vec4s(), warp.splits(), warp.rank());
      warp.template init<BufferBarrier::row_stats>(kBufferArrivals);
      warp.template init<BufferBarrier::outputs>(kBufferArrivals);
      warp.fence_init();
      expect_bytes<BufferBarrier::row_stats>(warp, vec4s);
      expect_bytes<BufferBarrier::outputs>(warp, vec4s);
    }
  }
  if (warp.has_first_thread() && !from_warps) {
    warp.template init<BufferBarrier::vec4s>(kBufferArrivals);
    warp.fence_init();
    expect_bytes<BufferBarrier::vec4s>(warp,
                                       vec4s_to_combine(warp.vec4s(), warp.splits(), warp.rank()));
  }
  warp.arrive_at_cluster();
  if (!warp.has_fault(InjectedFault::sent_before_open)) warp.wait_for_cluster();
}

/// Sends the CTA's results to the CTAs that combine them, and combines the vec4s that this CTA
/// receives. The CTA may exit afterwards: it has received everything that others send to it. `to`
/// and `combined` belong to the warp's first vec4 and first pass.
template <typename Warp>
FLASHCORE_ROLE void combine_from_ctas(Warp& warp, typename Warp::PeerSlot to,
                                      typename Warp::CombinedVec4 combined) {
  const int vec4s = warp.vec4s();
  for (int vec4 = warp.first_vec4(); vec4 < vec4s;) {
    warp.send_vec4(to, vec4);
    vec4 += Warp::kThreads;
    if (vec4 < vec4s) to = warp.peer_slot(vec4);
  }
  FLASHCORE_LOOP
  for (int pass = warp.index(); vec4s > combined.vec4;) {
    warp.template wait<BufferBarrier::vec4s>();
    warp.combine_vec4(pass, combined);
    pass += Warp::kThreads / 32;
    combined = warp.combined_in(pass);
  }
}

/// The same if warps send their results. The mainloop sends the row statistics ahead of the
/// outputs, right after the last softmax; a warp without KV tiles sends them here.
template <typename Warp>
FLASHCORE_ROLE void combine_from_warps(Warp& warp, bool has_tiles) {
  if (!has_tiles) warp.send_row_stats();
  warp.send_outputs();
  FLASHCORE_LOOP
  for (int pass = 0;; ++pass) {
    typename Warp::CombinedSlice slice = warp.combined_in(pass);
    if (slice.row >= warp.rows()) return;
    warp.template wait<BufferBarrier::row_stats>();
    warp.combine_row_stats(slice);
    warp.template wait<BufferBarrier::outputs>();
    warp.combine_outputs(slice);
  }
}

/// Counts the CTAs of a work tile, after the warp has stored its share of the CTA's partial result.
/// The last CTA combines all rows. The counter wraps, so it is 0 again afterwards.
template <typename Warp>
FLASHCORE_ROLE void combine_in_last_cta(Warp& warp) {
  warp.sync_cta();
  if (warp.has_first_thread()) {
    const int last = warp.splits() - 1;
    const int wraps_at = warp.has_fault(InjectedFault::counter_left) ? last + 1 : last;
    const int wanted = warp.has_fault(InjectedFault::counted_wrong) ? last - 1 : last;
    warp.set_last(warp.count(wraps_at) == static_cast<std::uint32_t>(wanted));
  }
  warp.sync_cta();
  if (!warp.is_last()) return;
  FLASHCORE_LOOP
  for (int row = warp.index(); row < warp.rows(); row += Warp::kThreads / 32) warp.combine_row(row);
}

}  // namespace flashcore::core
