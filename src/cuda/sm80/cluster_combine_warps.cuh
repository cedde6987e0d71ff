// Split-KV of small tiles in a cluster: warps send their results straight to the CTA that combines
// them, without the reduction in their own CTA. The mainloop of a small tile computes little, so
// the combine is most of what follows the last loads. Row statistics go ahead while V is still in
// flight, so the weights are ready when the outputs arrive. Sending by warps quadruples the bytes:
// above core::ClusterBuffer::kWarpColumns that takes longer than it saves.
#pragma once

#include "cuda/primitives/cluster.cuh"
#include "cuda/sm80/cluster_combine.cuh"

namespace flashcore::cuda::sm80 {

/// True if warps, not CTAs, send the results of the work tile.
template <typename C>
__device__ __forceinline__ bool combines_from_warps(const AttentionParams& p,
                                                    const WorkTile& work) {
  constexpr int kMost = core::ClusterBuffer::rows_from_warps(C::kTileQ, C::kHeadDim);
  return C::kSwapAB && kHasClusters && p.cluster_combine &&
         (kMost == C::kTileQ || work.rows <= kMost);
}

/// The buffer behind a CTA's SharedStorage (core::ClusterBuffer), filled by warps. Its vec4s are
/// four columns of a thread's accumulators, which are 8 apart.
template <typename C>
struct WarpBuffer : core::WarpPartials<C::kHeadDim, C::kWarpsN> {
  static constexpr int kChunk = core::ClusterBuffer::kChunk;
  float4* s_out;        // [pass][split][warp][kChunk]
  float2* s_row_stats;  // [pass][split][warp][kChunkRows]

  __device__ __forceinline__ explicit WarpBuffer(SharedStorage<C>& s)
      : s_out(ClusterBuffer<C>::template at<float4>(s, kLayout.outputs)),
        s_row_stats(ClusterBuffer<C>::template at<float2>(s, kLayout.row_stats)) {}

 private:
  static constexpr core::ClusterBuffer::Layout kLayout =
      core::ClusterBuffer::layout_of_warps(C::kTileQ, C::kHeadDim, C::kWarpsN);
  static_assert(WarpBuffer::kChunkRows * WarpBuffer::kRowVec4s == kChunk);
};

/// Destinations of a thread's two rows, as cluster addresses. Computed before the mainloop, so that
/// nothing delays the sends after the last GEMM.
template <typename C>
struct WarpExchange {
  struct {
    std::uint32_t row_stats, row_stats_full, out, out_full;
  } of_row[2];

  __device__ __forceinline__ void init(SharedStorage<C>& s, const AttentionParams& p,
                                       const WorkTile& work, const Thread<C>& t) {
    const WarpBuffer<C> buffer(s);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const core::ClusterSlot to =
          buffer.peer_slot_of_row(t.row(0, half), p.splits, work.split, t.warp_n);
      of_row[half].out =
          cluster_address(buffer.s_out + to.index * buffer.kRowVec4s + t.column(0, 0), to.rank);
      of_row[half].row_stats = cluster_address(buffer.s_row_stats + to.index, to.rank);
      of_row[half].row_stats_full =
          cluster_address(&ClusterBuffer<C>::barrier(s, BufferBarrier::row_stats), to.rank);
      of_row[half].out_full =
          cluster_address(&ClusterBuffer<C>::barrier(s, BufferBarrier::outputs), to.rank);
    }
  }
};

/// Sends maximum and sum of the warp's rows, after its last softmax.
template <typename C>
__device__ __forceinline__ void send_row_stats(const WarpExchange<C>& exchange,
                                               const RowStats<C>& row_stats, const WorkTile& work,
                                               const Thread<C>& t) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const core::SoftmaxState<float>& state = row_stats.of[0][half];
    const float sum = row_reduce_sum<C>(state.sum);
    if (!t.is_row_leader() || t.row(0, half) >= work.rows) continue;
    store_cluster(exchange.of_row[half].row_stats, {state.max * work.unit, sum},
                  exchange.of_row[half].row_stats_full);
  }
}

template <typename C>
__device__ __forceinline__ void send_outputs(const WarpExchange<C>& exchange, const AccO<C>& acc_o,
                                             const WorkTile& work, const Thread<C>& t) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (t.row(0, half) >= work.rows) continue;
    const int low = C::reg_of(half, 0), high = C::reg_of(half, 1);
#pragma unroll
    for (int n = 0; n < C::kColumnTiles; n += 2) {
      store_cluster(
          exchange.of_row[half].out + n / 2 * 8 * sizeof(float4),
          {acc_o[0][n][low], acc_o[0][n][high], acc_o[0][n + 1][low], acc_o[0][n + 1][high]},
          exchange.of_row[half].out_full);
    }
  }
}

/// A thread of a CTA whose warps send their results.
template <typename C, bool kFastPath>
struct WarpExchangeThread : ClusterThread<C> {
  static_assert(C::kWarpsN == 4);  // one for each octet of lanes
  static constexpr int kMaxSplits = core::ClusterBuffer::kMaxSplits;
  const WarpExchange<C>& exchange;
  const RowStats<C>& row_stats;
  const AccO<C>& acc_o;
  const Thread<C>& t;

  __device__ __forceinline__ void send_row_stats() const {
    sm80::send_row_stats<C>(exchange, row_stats, this->work, t);
  }
  __device__ __forceinline__ void send_outputs() const {
    sm80::send_outputs<C>(exchange, acc_o, this->work, t);
  }

  /// The part of a chunk that a warp combines in a pass: 8 vec4s, which are 32 columns of a row.
  /// Octet w of its lanes combines what warps w of all splits have sent. A reduction over the
  /// octets follows, after which each lane has one column.
  struct CombinedSlice {
    int row, column;
    Row output_row;
    std::int64_t offset;
    const float2* s_row_stats;
    const float4* s_out;
    float weight[kMaxSplits];
    float sum_of_keys;
    FinalRow final;
  };

  __device__ __forceinline__ CombinedSlice combined_in(int pass) const {
    const WarpBuffer<C> buffer(this->s);
    const int lane = threadIdx.x % 32, sender = lane / 8;
    const int s_first = this->index() * 8;  // first vec4 in the chunk
    const int first = core::combined_vec4(pass, this->p.splits, this->work.split, s_first);
    CombinedSlice slice;
    slice.row = first / buffer.kRowVec4s;
    slice.output_row = row_of(this->p, this->work, slice.row);
    slice.offset = output_offset(this->p, this->work, slice.output_row);
    slice.column = 4 * (first % buffer.kRowVec4s) + lane;
    const int partial = buffer.partial_index(pass, this->p.splits, 0, sender);
    slice.s_row_stats =
        buffer.s_row_stats + partial * buffer.kChunkRows + s_first / buffer.kRowVec4s;
    slice.s_out = buffer.s_out + partial * buffer.kChunk + s_first + lane % 8;
    return slice;
  }

  /// Weights of the splits and the row's combined statistics.
  __device__ __forceinline__ void combine_row_stats(CombinedSlice& slice) const {
    constexpr int kStride = C::kWarpsN * WarpBuffer<C>::kChunkRows;  // from split to split
    float(&weight)[kMaxSplits] = slice.weight;
    float sum[kMaxSplits];
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) {
      const float2 state = i < this->p.splits ? slice.s_row_stats[i * kStride]
                                              : make_float2(core::negative_infinity<float>(), 0.f);
      weight[i] = state.x;
      sum[i] = state.y;
    }
    core::SoftmaxState<float> all{cross_octet_max(largest(weight)), 0.f};
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) {
      weight[i] = core::partial_weight<FastMath>(weight[i], all.max);
      all.sum = fmaf(sum[i], weight[i], all.sum);
      if (this->p.fault.is(InjectedFault::combine_double_counts)) weight[i] *= weight[i];
    }
    all.sum = cross_octet_sum(all.sum);
    slice.sum_of_keys = all.sum;
    slice.final = finalize_row(this->p, slice.output_row, all);
  }

  /// Combines the outputs and stores one column.
  __device__ __forceinline__ void combine_outputs(const CombinedSlice& slice) const {
    constexpr int kStride = C::kWarpsN * WarpBuffer<C>::kChunk;
    const AttentionParams& p = this->p;
    float x[4] = {};
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) {
      const float4 out = i < p.splits ? slice.s_out[i * kStride] : make_float4(0.f, 0.f, 0.f, 0.f);
      x[0] = fmaf(out.x, slice.weight[i], x[0]);
      x[1] = fmaf(out.y, slice.weight[i], x[1]);
      x[2] = fmaf(out.z, slice.weight[i], x[2]);
      x[3] = fmaf(out.w, slice.weight[i], x[3]);
    }
    const float y =
        core::output_of_keys(cross_octet_sum_each(x), slice.sum_of_keys) * slice.final.factor;
    const Row& row = slice.output_row;
    if (fault_skips_row(p, this->work, row)) return;
    assert_row(p, this->work, row, slice.final, {y});
    if (slice.column == 0 && p.lse != nullptr) {
      store_lse(p, this->work, row, slice.final.lse(p.fault));
    }
    if (kFastPath || slice.column < p.v_dim) {
      with_output<C>(p, [&](auto* g_out) {
        from_float(g_out[slice.offset + slice.column * (kFastPath ? 1 : p.out_strides.column)], y);
      });
    }
  }
};

}  // namespace flashcore::cuda::sm80
