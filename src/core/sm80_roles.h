// How the CTAs of an sm80 kernel join the results of split KV, as far as they wait for each other.
// A role is a template over the warp that plays it: the kernel's (cuda/sm80/combine.cuh,
// warp_join.cuh), which sends and adds numbers, or the model's (tests/protocol), which checks every
// access. Both run these very lines.
//
// CTAs of a cluster (core/cluster_buffer.h):
//   open_buffer       every warp, before its mainloop
//   combine_from_ctas  afterwards, where CTAs send their results; or
//   combine_from_warps   where warps send theirs
// Other CTAs:
//   finish_split     the last CTA joins what all have left in the workspace
#pragma once

#include "core/cluster_buffer.h"
#include "core/fast_divmod.h"
#include "core/fault.h"

namespace flashcore::core {

/// Key ranges of an item that are joined: those that hold keys of its sequence, and at least one.
FLASHCORE_HD constexpr std::int32_t splits_with_keys(std::int32_t kv_len,
                                                     const FastDivmod& split_keys_divmod) {
  return div((kv_len > 1 ? kv_len : 1) - 1, split_keys_divmod) + 1;
}

/// Whether a CTA has a range to compute. Otherwise nobody waits for it.
FLASHCORE_HD constexpr bool has_split(std::int32_t rows, std::int32_t split, std::int32_t splits) {
  return rows > 0 && split < splits;
}

template <BufferBarrier kBarrier, typename Warp>
FLASHCORE_ROLE void expect_bytes(Warp& warp, int pieces) {
  warp.template arrive_expect_tx<kBarrier>(
      expected_bytes<kBarrier>(pieces, Warp::kRowPieces, warp.splits(), Warp::kWarpsN,
                               warp.has_fault(InjectedFault::expected_bytes_short)));
}

/// Nobody sends before all inboxes of the cluster are open. Runs while the first keys are loaded:
/// the wait is hidden.
template <typename Warp>
FLASHCORE_ROLE void open_buffer(Warp& warp, bool by_warps) {
  if constexpr (Warp::kSwapAB) {
    if (warp.has_first_thread() && by_warps) {
      const int pieces = pieces_to_join(warp.pieces(), warp.splits(), warp.rank());
      warp.template init<BufferBarrier::states>(kInboxArrivals);
      warp.template init<BufferBarrier::outputs>(kInboxArrivals);
      warp.fence_init();
      expect_bytes<BufferBarrier::states>(warp, pieces);
      expect_bytes<BufferBarrier::outputs>(warp, pieces);
    }
  }
  if (warp.has_first_thread() && !by_warps) {
    warp.template init<BufferBarrier::pieces>(kInboxArrivals);
    warp.fence_init();
    expect_bytes<BufferBarrier::pieces>(warp,
                                        pieces_to_join(warp.pieces(), warp.splits(), warp.rank()));
  }
  warp.arrive_at_cluster();
  if (!warp.has_fault(InjectedFault::sent_before_open)) warp.wait_for_cluster();
}

/// Sends the CTA's results to the CTAs that join them, and joins what this CTA was sent. The CTA
/// may end then: all bytes that others send to it have come. `to` and `joined` are of the warp's
/// first piece and turn.
template <typename Warp>
FLASHCORE_ROLE void combine_from_ctas(Warp& warp, typename Warp::PeerSlot to,
                                      typename Warp::Joined joined) {
  const int pieces = warp.pieces();
  for (int piece = warp.first_piece(); piece < pieces;) {
    warp.send_piece(to, piece);
    piece += Warp::kThreads;
    if (piece < pieces) to = warp.recipient(piece);
  }
  FLASHCORE_LOOP
  for (int turn = warp.index(); pieces > joined.piece;) {
    warp.template wait<BufferBarrier::pieces>();
    warp.combine_piece(turn, joined);
    turn += Warp::kThreads / 32;
    joined = warp.joined_in(turn);
  }
}

/// The same where warps send their results. States go ahead of outputs, in the mainloop: with the
/// last scores. A warp without steps sends them here.
template <typename Warp>
FLASHCORE_ROLE void combine_from_warps(Warp& warp, bool had_steps) {
  if (!had_steps) warp.send_row_stats();
  warp.send_outputs();
  FLASHCORE_LOOP
  for (int turn = 0;; ++turn) {
    typename Warp::Turn joined = warp.turn(turn);
    if (joined.row >= warp.rows()) return;
    warp.template wait<BufferBarrier::states>();
    warp.combine_row_stats(joined);
    warp.template wait<BufferBarrier::outputs>();
    warp.combine_outputs(joined);
  }
}

/// Counts the item's CTAs, when the warp has written its part of the CTA's results. The last CTA
/// joins the rows of all. The counter wraps, so it is 0 again after the last.
template <typename Warp>
FLASHCORE_ROLE void finish_split(Warp& warp) {
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
