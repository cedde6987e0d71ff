// Joining the key ranges of few rows in a cluster. A step's K and V leave little to compute then,
// so most of what follows the last of them would be the join: here warps send their results
// straight to the block that joins them, not to their own block first, and a row's maximum and sum
// go ahead while V is still waited for. Whoever joins has all weights when the outputs come. That
// is four times as much to send: with more than core::ClusterBuffer::kWarpColumns it takes longer
// than it saves.
#pragma once

#include "cuda/primitives/cluster.cuh"
#include "cuda/sm80/combine.cuh"

namespace flashcore::cuda::sm80 {

/// Whether warps send the item's results themselves.
template <typename C>
__device__ __forceinline__ bool combines_from_warps(const AttentionParams& p,
                                                    const WorkTile& item) {
  constexpr int kMost = core::ClusterBuffer::rows_from_warps(C::kTileQ, C::kHeadDim);
  return C::kSwapAB && kHasClusters && p.cluster_combine &&
         (kMost == C::kTileQ || item.rows <= kMost);
}

/// The inbox behind a block's shared memory, as in core::ClusterBuffer, filled by warps; but a
/// piece is four columns that a thread has in its accumulators, which lie 8 apart.
template <typename C>
struct WarpInbox : core::WarpParts<C::kHeadDim, C::kWarpsN> {
  static constexpr int kChunk = core::ClusterBuffer::kChunk;
  float4* s_out;    // [turn][split][warp][kChunk]
  float2* s_state;  // [turn][split][warp][kChunkRows]

  __device__ __forceinline__ explicit WarpInbox(SharedStorage<C>& s)
      : s_out(ClusterBuffer<C>::template at<float4>(s, kLayout.outputs)),
        s_state(ClusterBuffer<C>::template at<float2>(s, kLayout.states)) {}

 private:
  static constexpr core::ClusterBuffer::Layout kLayout =
      core::ClusterBuffer::layout_of_warps(C::kTileQ, C::kHeadDim, C::kWarpsN);
  static_assert(WarpInbox::kChunkRows * WarpInbox::kRowPieces == kChunk);
};

/// Where a thread's results of its two rows go, in the cluster's addresses. Found before the loop:
/// nothing then stands between the last product and its way to the others.
template <typename C>
struct WarpRoute {
  struct {
    std::uint32_t state, states_full, out, out_full;
  } of_row[2];

  __device__ __forceinline__ void find(SharedStorage<C>& s, const AttentionParams& p,
                                       const WorkTile& item, const Thread<C>& t) {
    const WarpInbox<C> inbox(s);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const core::ClusterSlot to =
          inbox.recipient_of_row(t.row(0, half), p.splits, item.split, t.warp_n);
      of_row[half].out =
          cluster_address(inbox.s_out + to.index * inbox.kRowPieces + t.column(0, 0), to.rank);
      of_row[half].state = cluster_address(inbox.s_state + to.index, to.rank);
      of_row[half].states_full =
          cluster_address(&ClusterBuffer<C>::barrier(s, BufferBarrier::states), to.rank);
      of_row[half].out_full =
          cluster_address(&ClusterBuffer<C>::barrier(s, BufferBarrier::outputs), to.rank);
    }
  }
};

/// When a row's last probabilities are known.
template <typename C>
__device__ __forceinline__ void send_row_stats(const WarpRoute<C>& route, const RowStats<C>& states,
                                               const WorkTile& item, const Thread<C>& t) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const core::SoftmaxState<float>& state = states.of[0][half];
    const float sum = row_reduce_sum<C>(state.sum);
    if (!t.is_row_leader() || t.row(0, half) >= item.rows) continue;
    store_cluster(route.of_row[half].state, {state.max * item.unit, sum},
                  route.of_row[half].states_full);
  }
}

template <typename C>
__device__ __forceinline__ void send_outputs(const WarpRoute<C>& route, const AccO<C>& acc_o,
                                             const WorkTile& item, const Thread<C>& t) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (t.row(0, half) >= item.rows) continue;
    const int low = C::reg_of(half, 0), high = C::reg_of(half, 1);
#pragma unroll
    for (int n = 0; n < C::kColumnTiles; n += 2) {
      store_cluster(
          route.of_row[half].out + n / 2 * 8 * sizeof(float4),
          {acc_o[0][n][low], acc_o[0][n][high], acc_o[0][n + 1][low], acc_o[0][n + 1][high]},
          route.of_row[half].out_full);
    }
  }
}

/// A thread of a block whose warps send their results.
template <typename C, bool kFastPath>
struct PartThread : ClusterThread<C> {
  static_assert(C::kWarpsN == 4);  // octets
  static constexpr int kMaxSplits = core::ClusterBuffer::kMaxSplits;
  const WarpRoute<C>& route;
  const RowStats<C>& states;
  const AccO<C>& acc_o;
  const Thread<C>& t;

  __device__ __forceinline__ void send_row_stats() const {
    sm80::send_row_stats<C>(route, states, this->item, t);
  }
  __device__ __forceinline__ void send_outputs() const {
    sm80::send_outputs<C>(route, acc_o, this->item, t);
  }

  /// What a warp joins in a turn: 8 pieces of a chunk, which are 32 columns of a row. Octet w of
  /// its lanes joins what the warps w of all splits have sent, then the octets each other's, so
  /// that a lane ends up with one column.
  struct Turn {
    int row, column;
    Row output_row;
    std::int64_t offset;
    const float2* s_state;
    const float4* s_out;
    float weight[kMaxSplits];
    core::SoftmaxState<float> all;
    float sum_of_keys, factor;
  };

  __device__ __forceinline__ Turn turn(int turn) const {
    const WarpInbox<C> inbox(this->s);
    const int lane = threadIdx.x % 32, sender = lane / 8;
    const int s_first = this->index() * 8;  // its pieces of a chunk
    const int first = core::combined_piece(turn, this->p.splits, this->item.split, s_first);
    Turn joined;
    joined.row = first / inbox.kRowPieces;
    joined.output_row = row_of(this->p, this->item, joined.row);
    joined.offset = output_offset(this->p, this->item, joined.output_row);
    joined.column = 4 * (first % inbox.kRowPieces) + lane;
    const int part = inbox.part(turn, this->p.splits, 0, sender);
    joined.s_state = inbox.s_state + part * inbox.kChunkRows + s_first / inbox.kRowPieces;
    joined.s_out = inbox.s_out + part * inbox.kChunk + s_first + lane % 8;
    return joined;
  }

  __device__ __forceinline__ void combine_row_stats(Turn& joined) const {
    constexpr int kStride = C::kWarpsN * WarpInbox<C>::kChunkRows;  // from split to split
    core::SoftmaxState<float>& all = joined.all;
    float(&weight)[kMaxSplits] = joined.weight;
    float sum[kMaxSplits];
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) {
      const float2 state = i < this->p.splits ? joined.s_state[i * kStride]
                                              : make_float2(core::negative_infinity<float>(), 0.f);
      weight[i] = state.x;
      sum[i] = state.y;
    }
    all = {cross_octet_max(largest(weight)), 0.f};
    const float base = core::softmax_base(all.max);
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) {
      weight[i] = fast_exp(weight[i] - base);
      all.sum = fmaf(sum[i], weight[i], all.sum);
      if (this->p.fault.is(InjectedFault::combine_double_counts)) weight[i] *= weight[i];
    }
    all.sum = cross_octet_sum(all.sum);
    joined.sum_of_keys = all.sum;
    joined.factor = finalize_stats(this->p, joined.output_row, all);
  }

  __device__ __forceinline__ void combine_outputs(const Turn& joined) const {
    constexpr int kStride = C::kWarpsN * WarpInbox<C>::kChunk;
    const AttentionParams& p = this->p;
    float x[4] = {};
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) {
      const float4 out = i < p.splits ? joined.s_out[i * kStride] : make_float4(0.f, 0.f, 0.f, 0.f);
      x[0] = fmaf(out.x, joined.weight[i], x[0]);
      x[1] = fmaf(out.y, joined.weight[i], x[1]);
      x[2] = fmaf(out.z, joined.weight[i], x[2]);
      x[3] = fmaf(out.w, joined.weight[i], x[3]);
    }
    const float y = core::output_of_keys(cross_octet_sum_each(x), joined.sum_of_keys) * joined.factor;
    const Row& row = joined.output_row;
    if (fault_skips_row(p, this->item, row)) return;
    assert_row(p, this->item, row, joined.all, {y});
    if (joined.column == 0 && p.lse != nullptr) {
      store_lse(p, this->item, row, lse_of(p, joined.all));
    }
    if (kFastPath || joined.column < p.v_dim) {
      with_output<C, kFastPath>(p, [&](auto* g_out) {
        from_float(g_out[joined.offset + joined.column * (kFastPath ? 1 : p.out_strides.column)],
                   y);
      });
    }
  }
};

}  // namespace flashcore::cuda::sm80
