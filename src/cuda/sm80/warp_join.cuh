// Joining the key ranges of few rows in a cluster. A step's K and V leave little to compute then,
// so most of what follows the last of them would be the join: here warps send their results
// straight to the block that joins them, not to their own block first, and a row's maximum and sum
// go ahead while V is still waited for. Whoever joins has all weights when the outputs come. That
// is four times as much to send: with more than core::Inbox::kWarpColumns it takes longer than it
// saves.
#pragma once

#include "cuda/primitives/cluster.cuh"
#include "cuda/sm80/join.cuh"

namespace flashcore::cuda::sm80 {

/// Whether warps send the item's results themselves.
template <typename C>
__device__ __forceinline__ bool warps_join(const AttentionParams& p, const Item& item) {
  constexpr int kMost = core::Inbox::rows_from_warps(C::kTileQ, C::kHeadDim);
  return C::kFewRows && kHasClusters && p.joins_in_cluster &&
         (kMost == C::kTileQ || item.rows <= kMost);
}

/// Behind what a block of a cluster keeps in shared memory, as in core::Inbox; but a piece is four
/// columns that a thread has in its accumulators, which lie 8 apart, each warp of each split sends
/// its part of a chunk, and with that one state for each row.
template <typename C>
struct WarpInbox {
  static constexpr int kChunk = core::Inbox::kChunk;
  static constexpr int kRowPieces = C::kHeadDim / 4;
  static constexpr int kChunkRows = kChunk / kRowPieces;
  static_assert(kChunkRows * kRowPieces == kChunk);
  std::uint64_t& s_states_full;
  std::uint64_t& s_out_full;
  float4* s_out;    // [turn][split][warp][kChunk]
  float2* s_state;  // [turn][split][warp][kChunkRows]

  __device__ __forceinline__ explicit WarpInbox(SharedStorage<C>& s)
      : s_states_full(*reinterpret_cast<std::uint64_t*>(&s + 1)),
        s_out_full(*(&s_states_full + 1)),
        s_out(reinterpret_cast<float4*>(&s_states_full) + 1),
        s_state(reinterpret_cast<float2*>(s_out + kParts * kChunk)) {}

 private:
  static constexpr int kParts =
      core::Inbox::chunks(core::Inbox::rows_from_warps(C::kTileQ, C::kHeadDim), C::kHeadDim) *
      C::kKeyWarps;
  static_assert(core::Inbox::kBarrierBytes +
                    kParts * (kChunk * sizeof(float4) + kChunkRows * sizeof(float2)) <=
                core::Inbox::bytes(C::kTileQ, C::kHeadDim, C::kThreads));
};

/// Prepares the inbox; for one thread.
template <typename C>
__device__ __forceinline__ void expect_parts(SharedStorage<C>& s, const AttentionParams& p,
                                             const Item& item) {
  const WarpInbox<C> inbox(s);
  const int pieces = pieces_to_join<C>(p, item), parts = p.splits * C::kKeyWarps;
  init_barrier(inbox.s_states_full, 1);
  init_barrier(inbox.s_out_full, 1);
  fence_barrier_init();
  arrive_expecting(inbox.s_states_full, pieces / inbox.kRowPieces * parts * sizeof(float2));
  arrive_expecting(inbox.s_out_full, pieces * parts * sizeof(float4));
}

/// Every thread of the cluster comes here before its loop, while the first keys are on their way:
/// then nobody waits for it.
template <typename C>
__device__ __forceinline__ void open_inbox(SharedStorage<C>& s, const AttentionParams& p,
                                           const Item& item) {
  const bool by_warps = warps_join<C>(p, item);
  if constexpr (C::kFewRows) {
    if (threadIdx.x == 0 && by_warps) expect_parts<C>(s, p, item);
  }
  if (threadIdx.x == 0 && !by_warps) expect_pieces<C>(s, p, item);
  arrive_at_cluster();
  wait_for_cluster();  // all inboxes are open
}

/// Where a thread's results of its two rows go, in the cluster's addresses. Found before the loop:
/// nothing then stands between the last product and its way to the others.
template <typename C>
struct WarpRoute {
  struct {
    std::uint32_t state, states_full, out, out_full;
  } of_row[2];

  __device__ __forceinline__ void find(SharedStorage<C>& s, const AttentionParams& p,
                                       const Item& item, const Thread<C>& t) {
    const WarpInbox<C> inbox(s);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = t.row(0, half), chunk = r / inbox.kChunkRows;
      const int turn = chunk / p.splits, to = joins_at(p, chunk - turn * p.splits);
      const int part = (turn * p.splits + item.split) * C::kKeyWarps + t.key_warp;
      const int s_row = part * inbox.kChunkRows + r % inbox.kChunkRows;
      of_row[half].out =
          cluster_address(inbox.s_out + s_row * inbox.kRowPieces + t.column(0, 0), to);
      of_row[half].state = cluster_address(inbox.s_state + s_row, to);
      of_row[half].states_full = cluster_address(&inbox.s_states_full, to);
      of_row[half].out_full = cluster_address(&inbox.s_out_full, to);
    }
  }
};

/// When a row's last probabilities are known.
template <typename C>
__device__ __forceinline__ void send_states(const WarpRoute<C>& route, const RowStates<C>& states,
                                            const Item& item, const Thread<C>& t) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const core::SoftmaxState<float>& state = states.of[0][half];
    const float sum = row_lanes_sum<C>(state.sum);
    if (!t.speaks_for_rows() || t.row(0, half) >= item.rows) continue;
    store_cluster(route.of_row[half].state, {state.max * item.factor, sum},
                  route.of_row[half].states_full);
  }
}

template <typename C>
__device__ __forceinline__ void send_outputs(const WarpRoute<C>& route, const Outputs<C>& o,
                                             const Item& item, const Thread<C>& t) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (t.row(0, half) >= item.rows) continue;
    const int low = C::reg_of(half, 0), high = C::reg_of(half, 1);
#pragma unroll
    for (int n = 0; n < C::kColumnTiles; n += 2) {
      store_cluster(route.of_row[half].out + n / 2 * 8 * sizeof(float4),
                    {o[0][n][low], o[0][n][high], o[0][n + 1][low], o[0][n + 1][high]},
                    route.of_row[half].out_full);
    }
  }
}

/// Joins what the block was sent. A warp takes 8 pieces of a chunk, which are 32 columns of a row:
/// octet w of its lanes joins what the warps w of all splits have sent, then the octets each
/// other's, so that a lane ends up with one column.
template <typename C, bool kPlain>
__device__ __forceinline__ void join_parts(SharedStorage<C>& s, const AttentionParams& p,
                                           const Item& item) {
  constexpr int kMaxSplits = core::Inbox::kMaxSplits;
  static_assert(C::kKeyWarps == 4);  // octets
  const WarpInbox<C> inbox(s);
  const int lane = threadIdx.x % 32, sender = lane / 8;
  const int s_first = threadIdx.x / 32 * 8;  // its pieces of a chunk
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    const int first = (turn * p.splits + joins_at(p, item.split)) * inbox.kChunk + s_first;
    const int r = first / inbox.kRowPieces;
    if (r >= item.rows) return;
    const Row row = row_of(p, item, r);
    const std::int64_t offset = output_offset(p, item, row);
    const int column = 4 * (first % inbox.kRowPieces) + lane;
    const int part = turn * p.splits * C::kKeyWarps + sender;
    const float2* s_state = inbox.s_state + part * inbox.kChunkRows + s_first / inbox.kRowPieces;
    const float4* s_out = inbox.s_out + part * inbox.kChunk + s_first + lane % 8;
    wait(inbox.s_states_full, 0);
    float weight[kMaxSplits], sum[kMaxSplits];
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) {
      const float2 state = i < p.splits ? s_state[i * C::kKeyWarps * inbox.kChunkRows]
                                        : make_float2(core::negative_infinity<float>(), 0.f);
      weight[i] = state.x;
      sum[i] = state.y;
    }
    core::SoftmaxState<float> all{octets_max(largest(weight)), 0.f};
    const float base = core::softmax_base(all.max);
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) {
      weight[i] = fast_exp2(weight[i] - base);
      all.sum = fmaf(sum[i], weight[i], all.sum);
      if (p.plant.is(PlantedBug::combine_double_counts)) weight[i] *= weight[i];
    }
    all.sum = octets_sum(all.sum);
    const float sum_of_keys = all.sum;
    const float factor = finish_state(p, row, all);
    wait(inbox.s_out_full, 0);
    float x[4] = {};
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) {
      const float4 out =
          i < p.splits ? s_out[i * C::kKeyWarps * inbox.kChunk] : make_float4(0.f, 0.f, 0.f, 0.f);
      x[0] = fmaf(out.x, weight[i], x[0]);
      x[1] = fmaf(out.y, weight[i], x[1]);
      x[2] = fmaf(out.z, weight[i], x[2]);
      x[3] = fmaf(out.w, weight[i], x[3]);
    }
    const float y = core::output_of_keys(octets_sum_each(x), sum_of_keys) * factor;
    if (left_out(p, item, row)) continue;
    assert_row(p, item, row, all, {y});
    if (column == 0 && p.lse != nullptr) store_lse(p, item, row, lse_of(p, all));
    if (kPlain || column < p.v_dim) {
      with_output<C, kPlain>(p, [&](auto* g_out) {
        from_float(g_out[offset + column * (kPlain ? 1 : p.out_strides.column)], y);
      });
    }
  }
}

}  // namespace flashcore::cuda::sm80
