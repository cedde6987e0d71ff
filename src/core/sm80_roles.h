// How the CTAs of an sm80 kernel join the results of split KV, as far as they wait for each other.
// A role is a template over the warp that plays it: the kernel's (cuda/sm80/join.cuh,
// warp_join.cuh), which sends and adds numbers, or the model's (tests/protocol), which checks every
// access. Both run these very lines.
//
// CTAs of a cluster (core/cluster_inbox.h):
//   open_inbox       every warp, before its mainloop
//   exchange_pieces  afterwards, where CTAs send their results; or
//   exchange_parts   where warps send theirs
// Other CTAs:
//   finish_split     the last CTA joins what all have left in the workspace
#pragma once

#include "core/cluster_buffer.h"
#include "core/fast_divmod.h"
#include "core/fault.h"

namespace flashcore::core {

/// Key ranges of an item that are joined: those that hold keys of its sequence, and at least one.
FLASHCORE_HD constexpr std::int32_t ranges_with_keys(std::int32_t kv_len,
                                                     const Divisor& by_split_keys) {
  return divide((kv_len > 1 ? kv_len : 1) - 1, by_split_keys) + 1;
}

/// Whether a CTA has a range to compute. Otherwise nobody waits for it.
FLASHCORE_HD constexpr bool has_range(std::int32_t rows, std::int32_t split, std::int32_t splits) {
  return rows > 0 && split < splits;
}

template <InboxBarrier kBarrier, typename Warp>
FLASHCORE_ROLE void expect_bytes(Warp& warp, int pieces) {
  warp.template arrive_expecting<kBarrier>(
      expected_bytes<kBarrier>(pieces, Warp::kRowPieces, warp.splits(), Warp::kKeyWarps,
                               warp.has_fault(PlantedBug::expected_bytes_short)));
}

/// Nobody sends before all inboxes of the cluster are open. Runs while the first keys are loaded:
/// the wait is hidden.
template <typename Warp>
FLASHCORE_ROLE void open_inbox(Warp& warp, bool by_warps) {
  if constexpr (Warp::kFewRows) {
    if (warp.has_first_thread() && by_warps) {
      const int pieces = pieces_to_join(warp.pieces(), warp.splits(), warp.rank());
      warp.template init<InboxBarrier::states>(kInboxArrivals);
      warp.template init<InboxBarrier::outputs>(kInboxArrivals);
      warp.fence_init();
      expect_bytes<InboxBarrier::states>(warp, pieces);
      expect_bytes<InboxBarrier::outputs>(warp, pieces);
    }
  }
  if (warp.has_first_thread() && !by_warps) {
    warp.template init<InboxBarrier::pieces>(kInboxArrivals);
    warp.fence_init();
    expect_bytes<InboxBarrier::pieces>(warp,
                                       pieces_to_join(warp.pieces(), warp.splits(), warp.rank()));
  }
  warp.arrive_at_cluster();
  if (!warp.has_fault(PlantedBug::sent_before_open)) warp.wait_for_cluster();
}

/// Sends the CTA's results to the CTAs that join them, and joins what this CTA was sent. The CTA
/// may end then: all bytes that others send to it have come. `to` and `joined` are of the warp's
/// first piece and turn.
template <typename Warp>
FLASHCORE_ROLE void exchange_pieces(Warp& warp, typename Warp::Recipient to,
                                    typename Warp::Joined joined) {
  const int pieces = warp.pieces();
  for (int piece = warp.first_piece(); piece < pieces;) {
    warp.send_piece(to, piece);
    piece += Warp::kThreads;
    if (piece < pieces) to = warp.recipient(piece);
  }
  FLASHCORE_LOOP
  for (int turn = warp.index(); pieces > joined.piece;) {
    warp.template wait<InboxBarrier::pieces>();
    warp.join_piece(turn, joined);
    turn += Warp::kThreads / 32;
    joined = warp.joined_in(turn);
  }
}

/// The same where warps send their results. States go ahead of outputs, in the mainloop: with the
/// last scores. A warp without steps sends them here.
template <typename Warp>
FLASHCORE_ROLE void exchange_parts(Warp& warp, bool had_steps) {
  if (!had_steps) warp.send_states();
  warp.send_outputs();
  FLASHCORE_LOOP
  for (int turn = 0;; ++turn) {
    typename Warp::Turn joined = warp.turn(turn);
    if (joined.row >= warp.rows()) return;
    warp.template wait<InboxBarrier::states>();
    warp.join_states(joined);
    warp.template wait<InboxBarrier::outputs>();
    warp.join_outputs(joined);
  }
}

/// Counts the item's CTAs, when the warp has written its part of the CTA's results. The last CTA
/// joins the rows of all. The counter wraps, so it is 0 again after the last.
template <typename Warp>
FLASHCORE_ROLE void finish_split(Warp& warp) {
  warp.sync_cta();
  if (warp.has_first_thread()) {
    const int last = warp.splits() - 1;
    const int wraps_at = warp.has_fault(PlantedBug::counter_left) ? last + 1 : last;
    const int wanted = warp.has_fault(PlantedBug::counted_wrong) ? last - 1 : last;
    warp.set_last(warp.count(wraps_at) == static_cast<std::uint32_t>(wanted));
  }
  warp.sync_cta();
  if (!warp.is_last()) return;
  FLASHCORE_LOOP
  for (int row = warp.index(); row < warp.rows(); row += Warp::kThreads / 32) warp.join_row(row);
}

}  // namespace flashcore::core
