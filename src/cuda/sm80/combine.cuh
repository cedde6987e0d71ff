// Joining the key ranges of an item. Where its blocks are a cluster (sm_90, up to 8) they send each
// other their results, or their warps do (warp_join.cuh). Otherwise the last block to arrive reads
// all partial results from the workspace; they come from other SMs, so they are read past the L1
// cache. Waiting is all that either does, so many loads are under way at once.
#pragma once

#include "core/combine.h"
#include "core/sm80_roles.h"
#include "cuda/primitives/cluster.cuh"
#include "cuda/sm80/epilogue.cuh"

namespace flashcore::cuda::sm80 {

using core::BufferBarrier;

/// The inbox behind a block's shared memory (core::ClusterBuffer), filled by the blocks of its
/// cluster.
template <typename C>
struct ClusterBuffer {
  float4* s_out;
  float2* s_state;

  __device__ __forceinline__ explicit ClusterBuffer(SharedStorage<C>& s)
      : s_out(at<float4>(s, kLayout.outputs)), s_state(at<float2>(s, kLayout.states)) {}

  /// What lies `bytes` from its start.
  template <typename T>
  static __device__ __forceinline__ T* at(SharedStorage<C>& s, int bytes) {
    return reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(&s + 1) + bytes);
  }
  static __device__ __forceinline__ std::uint64_t& barrier(SharedStorage<C>& s,
                                                           BufferBarrier barrier) {
    return at<std::uint64_t>(s, 0)[core::mbarrier_index(barrier)];
  }

 private:
  static constexpr core::ClusterBuffer::Layout kLayout =
      core::ClusterBuffer::layout_of_ctas(C::kTileQ, C::kHeadDim);
  static_assert(core::ClusterBuffer::kOutBytes == sizeof(float4) &&
                core::ClusterBuffer::kStateBytes == sizeof(float2) &&
                core::ClusterBuffer::kBarrierBytes == 2 * sizeof(std::uint64_t));
};

/// A thread of a cluster, as the roles of core/sm80_roles.h see it.
template <typename C>
struct ClusterThread {
  static constexpr bool kSwapAB = C::kSwapAB;
  static constexpr int kThreads = C::kThreads;
  static constexpr int kWarpsN = C::kWarpsN;
  static constexpr int kRowPieces = C::kHeadDim / 4;
  SharedStorage<C>& s;
  const AttentionParams& p;
  const WorkTile& item;

  __device__ __forceinline__ bool has_fault(InjectedFault bug) const { return p.fault.is(bug); }
  __device__ __forceinline__ bool has_first_thread() const { return threadIdx.x == 0; }
  __device__ __forceinline__ int index() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int rank() const { return item.split; }
  __device__ __forceinline__ int splits() const { return p.splits; }
  __device__ __forceinline__ int rows() const { return item.rows; }
  __device__ __forceinline__ int pieces() const { return item.rows * kRowPieces; }

  template <BufferBarrier kBarrier>
  __device__ __forceinline__ void init(int arrivals) const {
    init_barrier(ClusterBuffer<C>::barrier(s, kBarrier), arrivals);
  }
  __device__ __forceinline__ void fence_init() const { fence_barrier_init(); }
  template <BufferBarrier kBarrier>
  __device__ __forceinline__ void arrive_expect_tx(int bytes) const {
    cuda::arrive_expect_tx(ClusterBuffer<C>::barrier(s, kBarrier), bytes);
  }
  template <BufferBarrier kBarrier>
  __device__ __forceinline__ void wait() const {
    cuda::wait(ClusterBuffer<C>::barrier(s, kBarrier), 0);
  }
  __device__ __forceinline__ void arrive_at_cluster() const { cuda::arrive_at_cluster(); }
  __device__ __forceinline__ void wait_for_cluster() const { cuda::wait_for_cluster(); }
};

/// Where piece `index` of a block's results goes, in the cluster's addresses.
struct PeerSlot {
  std::uint32_t out, state, barrier;

  template <typename C>
  __device__ __forceinline__ PeerSlot(SharedStorage<C>& s, const AttentionParams& p,
                                      const WorkTile& item, int index) {
    const ClusterBuffer<C> inbox(s);
    const core::ClusterSlot to = core::recipient_of_piece(index, p.splits, item.split);
    out = cluster_address(inbox.s_out + to.index, to.rank);
    state = cluster_address(inbox.s_state + to.index, to.rank);
    barrier = cluster_address(&inbox.barrier(s, BufferBarrier::pieces), to.rank);
  }
};

/// The piece that a thread joins in a turn, of what its block was sent, and where it is stored.
struct Joined {
  int piece;
  Row row;
  std::int64_t offset;

  template <typename C>
  __device__ __forceinline__ static Joined of_turn(const AttentionParams& p, const WorkTile& item,
                                                   int turn) {
    Joined joined;
    joined.piece =
        core::combined_piece(turn, p.splits, item.split, static_cast<int>(threadIdx.x % 32));
    joined.row = row_of(p, item, min(joined.piece / (C::kHeadDim / 4), item.rows - 1));
    joined.offset = output_offset(p, item, joined.row);
    return joined;
  }
};

/// Of a thread's part in the join, what can be known before there is anything to join: its first
/// pieces. Found while other warps still work, that costs nothing.
template <typename C>
struct ClusterExchange {
  PeerSlot recipient;
  Joined joined;

  __device__ __forceinline__ ClusterExchange(SharedStorage<C>& s, const AttentionParams& p,
                                             const WorkTile& item)
      : recipient(s, p, item, threadIdx.x), joined(Joined::of_turn<C>(p, item, threadIdx.x / 32)) {
    // Else it would be found out where it is needed.
    asm volatile(""
                 : "+r"(recipient.out), "+r"(recipient.state), "+r"(recipient.barrier),
                   "+r"(joined.piece), "+r"(joined.row.query), "+r"(joined.row.head),
                   "+l"(joined.offset));
  }
};

/// A thread of a block that joins in its cluster.
template <typename C, bool kFastPath>
struct PieceThread : ClusterThread<C> {
  using PeerSlot = sm80::PeerSlot;
  using Joined = sm80::Joined;
  static constexpr int kFours = C::kHeadDim / 4;

  __device__ __forceinline__ int first_piece() const { return threadIdx.x; }
  __device__ __forceinline__ PeerSlot recipient(int index) const {
    return PeerSlot(this->s, this->p, this->item, index);
  }
  __device__ __forceinline__ Joined joined_in(int turn) const {
    return Joined::of_turn<C>(this->p, this->item, turn);
  }

  __device__ __forceinline__ void send_piece(const PeerSlot& to, int index) const {
    float x[4] = {};
    const core::SoftmaxState<float> state =
        reduce_key_warps<C>(this->s.results, index / kFours, 4 * (index % kFours), x);
    store_cluster(to.out, x, to.barrier);
    store_cluster(to.state, {state.max, state.sum}, to.barrier);
  }

  __device__ __forceinline__ void combine_piece(int turn, const Joined& joined) const {
    constexpr int kMaxSplits = core::ClusterBuffer::kMaxSplits;
    const AttentionParams& p = this->p;
    const WorkTile& item = this->item;
    const ClusterBuffer<C> inbox(this->s);
    const int lane = threadIdx.x % 32;
    const int column = 4 * (joined.piece % kFours);
    float4 part[kMaxSplits];
    float max[kMaxSplits], sum[kMaxSplits];
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) {
      const int at = core::piece_slot(turn, p.splits, i, lane);
      const bool given = i < p.splits;
      const float2 state =
          given ? inbox.s_state[at] : make_float2(core::negative_infinity<float>(), 0.f);
      max[i] = state.x;
      sum[i] = state.y;
      part[i] = given ? inbox.s_out[at] : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    core::SoftmaxState<float> all_states{largest(max), 0.f};
    const float base = core::softmax_base(all_states.max);
    float x[4] = {};
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) {
      const float weight = fast_exp(max[i] - base);
      all_states.sum = fmaf(sum[i], weight, all_states.sum);
      const float counted =
          p.fault.is(InjectedFault::combine_double_counts) ? weight * weight : weight;
      x[0] = fmaf(part[i].x, counted, x[0]);
      x[1] = fmaf(part[i].y, counted, x[1]);
      x[2] = fmaf(part[i].z, counted, x[2]);
      x[3] = fmaf(part[i].w, counted, x[3]);
    }
    finalize_row(p, joined.row, all_states, x);
    if (!fault_skips_row(p, item, joined.row)) {
      assert_row(p, item, joined.row, all_states, x);
      if (column == 0 && p.lse != nullptr) {
        store_lse(p, item, joined.row, lse_of(p, all_states));
      }
      if (kFastPath || column < p.v_dim)
        store_output_columns<C, kFastPath>(p, joined.offset, column, x);
    }
  }
};

/// A range past the end of its sequence: nobody waits for it or reads more than this.
__device__ __forceinline__ void store_empty_partials(const AttentionParams& p,
                                                     const WorkTile& item) {
  for (int r = threadIdx.x; r < item.rows; r += blockDim.x) {
    static_cast<float*>(p.partial_lse)[partial_of(p, item, row_of(p, item, r), item.split)] =
        core::negative_infinity<float>();
  }
}

inline constexpr float kNoWeight = -1.f;  // of a part that saw no key: it left no output to read

/// A lane's share of a row's partial results.
struct RowParts {
  const float* g_lse;  // of split `lane`
  const float* g_out;  // four columns of split 0
};

/// How far apart the splits' results of a row are.
struct PartStrides {
  std::int64_t lse, out;
};

__device__ __forceinline__ RowParts parts_of(const AttentionParams& p, const WorkTile& item, int r,
                                             const PartStrides& strides) {
  const int lane = threadIdx.x % 32;
  const std::int64_t first = partial_of(p, item, row_of(p, item, r), 0);
  return {static_cast<const float*>(p.partial_lse) + first + lane * strides.lse,
          static_cast<const float*>(p.partial_out) + first * p.v_dim + 4 * lane};
}

/// A warp joins a row. All that counts is how long it takes one warp: lanes find the weights of a
/// split each while the outputs are on their way.
template <typename C, bool kFastPath>
__device__ __forceinline__ void combine_row(float* s_weights, const AttentionParams& p,
                                            const WorkTile& item, int r, const RowParts& parts,
                                            const PartStrides& strides) {
  constexpr int kLaneSplits = core::kMaxJoinedSplits / 32;
  constexpr int kAtOnce = C::kWarpPrivateKv ? 16 : 4;
  const int lane = threadIdx.x % 32;
  const int columns = kFastPath ? C::kHeadDim : p.v_dim;
  float4 part[kAtOnce];  // as many as registers allow
  const auto load = [&](int first_column, int split) {
    const float* g_out = parts.g_out + first_column + split * strides.out;
    const int left = columns - first_column - 4 * lane;  // may be <= 0
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, g_out += strides.out) {
      if (split + i < item.splits && left > 0) {
        part[i] = load_columns(g_out, 0, kFastPath || p.v_dim % 4 == 0 ? 4 : left);
      }
    }
  };
  float weight[kLaneSplits];
#pragma unroll
  for (int k = 0; k < kLaneSplits; ++k) {
    weight[k] = lane + 32 * k < item.splits ? __ldcg(parts.g_lse + 32 * k * strides.lse)
                                            : core::negative_infinity<float>();
  }
  load(0, 0);
  const Row row = row_of(p, item, r);
  const float sink =
      p.sinks != nullptr ? p.sinks[row.head * p.sinks_stride] : core::negative_infinity<float>();
  core::SoftmaxState<float> all{sink, 0.f};
#pragma unroll
  for (const float lse : weight) all.max = max_ignore_nan(all.max, lse);
  all.max = warp_max(all.max);
  const float base = core::softmax_base(all.max);
#pragma unroll
  for (int k = 0; k < kLaneSplits; ++k) {
    const bool nothing = weight[k] == core::negative_infinity<float>();
    const float counted = fast_exp(weight[k] - base);
    if (!nothing) all.sum += counted;
    const bool twice = p.fault.is(InjectedFault::combine_double_counts);
    s_weights[lane + 32 * k] = nothing ? kNoWeight : twice ? counted * counted : counted;
  }
  all.sum = warp_sum(all.sum);
  if (p.sinks != nullptr) {
    all.sum += fast_exp(sink - base);
  }
  const float factor = fast_output_factor(all.sum);
  __syncwarp();
  const bool written = !fault_skips_row(p, item, row);
#pragma unroll 1
  for (int first_column = 0; first_column < columns; first_column += 128) {
    float x[4] = {};
#pragma unroll 1
    for (int split = 0; split < item.splits; split += kAtOnce) {
      if (first_column > 0 || split > 0) load(first_column, split);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float counted = s_weights[split + i];  // none of what lies past the splits
        if (counted == kNoWeight) continue;
        x[0] = fmaf(counted, part[i].x, x[0]);
        x[1] = fmaf(counted, part[i].y, x[1]);
        x[2] = fmaf(counted, part[i].z, x[2]);
        x[3] = fmaf(counted, part[i].w, x[3]);
      }
    }
    const int column = first_column + 4 * lane;
    if (column >= columns || !written) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] *= factor;
      core::assert_output(p, item.seq, item.b, row.head, row.query, x[i]);
    }
    store_output_columns<C, kFastPath>(p, output_offset(p, item, row), column, x);
  }
  if (lane == 0 && p.lse != nullptr && written) store_lse(p, item, row, core::log_sum_exp(all));
  __syncwarp();  // before the next row's weights
}

/// A thread of a block that leaves its results in the workspace; the last block joins them.
template <typename C, bool kFastPath>
struct SplitThread {
  static constexpr int kThreads = C::kThreads;
  static constexpr int kWarps = kThreads / 32;
  SharedStorage<C>& s;
  const AttentionParams& p;
  const WorkTile& item;
  PartStrides strides;
  RowParts parts;  // of row index()

  __device__ __forceinline__ SplitThread(SharedStorage<C>& s_, const AttentionParams& p_,
                                         const WorkTile& item_)
      : s(s_), p(p_), item(item_) {
    // Found out here, while others still write, not when the counter has answered.
    strides = {core::partial_rows(p), core::partial_rows(p) * p.v_dim};
    parts = parts_of(p, item, min(index(), item.rows - 1), strides);
    asm volatile("" : "+l"(parts.g_lse), "+l"(parts.g_out), "+l"(strides.lse), "+l"(strides.out));
  }

  __device__ __forceinline__ bool has_fault(InjectedFault bug) const { return p.fault.is(bug); }
  __device__ __forceinline__ bool has_first_thread() const { return threadIdx.x == 0; }
  __device__ __forceinline__ int index() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int splits() const { return item.splits; }
  __device__ __forceinline__ int rows() const { return item.rows; }
  __device__ __forceinline__ void sync_cta() const { __syncthreads(); }
  __device__ __forceinline__ std::uint32_t count(int wraps_at) const {
    return atomic_inc_acq_rel(p.counters + item.index, wraps_at);
  }
  __device__ __forceinline__ void set_last(bool last) const { s.last = last; }
  __device__ __forceinline__ bool is_last() const { return s.last; }

  __device__ __forceinline__ void combine_row(int r) {
    float* s_weights = &s.results.acc_o[0][0][0] + index() * core::kMaxJoinedSplits;
    static_assert(sizeof(s.results.acc_o) >= kWarps * core::kMaxJoinedSplits * sizeof(float));
    if (r != index()) parts = parts_of(p, item, r, strides);
    sm80::combine_row<C, kFastPath>(s_weights, p, item, r, parts, strides);
  }
};

/// What follows when the warps have left their results.
template <typename C, bool kFastPath>
__device__ __forceinline__ void epilogue(SharedStorage<C>& s, const AttentionParams& p) {
  store_output<C, kFastPath>(s.results, p, s.item);
  if (p.splits > 1 && p.counters != nullptr) {
    SplitThread<C, kFastPath> thread(s, p, s.item);
    core::finish_split(thread);
  }
}

/// Apart, where its registers would displace some of the loop before; one for both ways, for many
/// rows come here only with splits.
template <typename C>
__device__ __noinline__ void epilogue_noinline(SharedStorage<C>& s, const AttentionParams& p) {
  epilogue<C, false>(s, p);
}

}  // namespace flashcore::cuda::sm80
