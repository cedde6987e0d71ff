// Joining the key ranges of an item. Where its blocks are a cluster (sm_90, up to 8) they send each
// other their results, or their warps do (warp_join.cuh). Otherwise the last block to arrive reads
// all partial results from the workspace; they come from other SMs, so they are read past the L1
// cache. Waiting is all that either does, so many loads are under way at once.
#pragma once

#include "core/combine.h"
#include "cuda/primitives/cluster.cuh"
#include "cuda/sm80/results.cuh"

namespace flashcore::cuda::sm80 {

/// Behind what a block of a cluster keeps in shared memory: see core::Inbox. A chunk's pieces of
/// one split lie side by side.
template <typename C>
struct Inbox {
  std::uint64_t& s_full;
  float4* s_out;
  float2* s_state;

  __device__ __forceinline__ explicit Inbox(SharedStorage<C>& s)
      : s_full(*reinterpret_cast<std::uint64_t*>(&s + 1)),
        s_out(reinterpret_cast<float4*>(&s_full) + 1),
        s_state(reinterpret_cast<float2*>(s_out + kPieces)) {}

 private:
  static_assert(core::Inbox::kBarrierBytes == sizeof(float4) &&
                core::Inbox::kPieceBytes == sizeof(float4) + sizeof(float2));
  static constexpr int kPieces = core::Inbox::chunks(C::kTileQ, C::kHeadDim) * core::Inbox::kChunk;
};

/// Which block of a cluster joins a turn's n-th chunk, and which chunk a block joins: they are
/// dealt out from the last block on, whose key range may be the shortest, so that it waits for the
/// others already.
__device__ __forceinline__ int joins_at(const AttentionParams& p, int n) {
  return p.splits - 1 - n;
}

/// Of an item's results, what this block joins.
template <typename C>
__device__ __forceinline__ int pieces_to_join(const AttentionParams& p, const Item& item) {
  constexpr int kChunk = core::Inbox::kChunk;
  const int all = item.rows * (C::kHeadDim / 4);
  int mine = 0;
  for (int first = joins_at(p, item.split) * kChunk; first < all; first += p.splits * kChunk) {
    mine += min(kChunk, all - first);
  }
  return mine;
}

/// Prepares the inbox; for one thread.
template <typename C>
__device__ __forceinline__ void expect_pieces(SharedStorage<C>& s, const AttentionParams& p,
                                              const Item& item) {
  const Inbox<C> inbox(s);
  init_barrier(inbox.s_full, 1);
  fence_barrier_init();
  arrive_expecting(inbox.s_full, pieces_to_join<C>(p, item) * p.splits * core::Inbox::kPieceBytes);
}

/// Where piece `index` of a block's results goes, in the cluster's addresses.
struct Recipient {
  std::uint32_t out, state, barrier;

  template <typename C>
  __device__ __forceinline__ Recipient(const Inbox<C>& inbox, const AttentionParams& p,
                                       const Item& item, int index) {
    constexpr int kChunk = core::Inbox::kChunk;
    const int chunk = index / kChunk, turn = chunk / p.splits;
    const int to = joins_at(p, chunk - turn * p.splits);
    const int at = (turn * p.splits + item.split) * kChunk + index % kChunk;
    out = cluster_address(inbox.s_out + at, to);
    state = cluster_address(inbox.s_state + at, to);
    barrier = cluster_address(&inbox.s_full, to);
  }
};

/// The piece that a thread joins in a turn, of what its block was sent, and where it is stored.
struct Joined {
  int piece;
  Row row;
  std::int64_t offset;

  template <typename C>
  __device__ __forceinline__ static Joined of_turn(const AttentionParams& p, const Item& item,
                                                   int turn) {
    Joined joined;
    joined.piece = (turn * p.splits + joins_at(p, item.split)) * core::Inbox::kChunk +
                   static_cast<int>(threadIdx.x % 32);
    joined.row = row_of(p, item, min(joined.piece / (C::kHeadDim / 4), item.rows - 1));
    joined.offset = output_offset(p, item, joined.row);
    return joined;
  }
};

/// Of a thread's part in the join, what can be known before there is anything to join: its first
/// pieces. Found while other warps still work, that costs nothing.
template <typename C>
struct ClusterRoute {
  Recipient recipient;
  Joined joined;

  __device__ __forceinline__ ClusterRoute(SharedStorage<C>& s, const AttentionParams& p,
                                          const Item& item)
      : recipient(Inbox<C>(s), p, item, threadIdx.x),
        joined(Joined::of_turn<C>(p, item, threadIdx.x / 32)) {
    // Else it would be found out where it is needed.
    asm volatile(""
                 : "+r"(recipient.out), "+r"(recipient.state), "+r"(recipient.barrier),
                   "+r"(joined.piece), "+r"(joined.row.query), "+r"(joined.row.head),
                   "+l"(joined.offset));
  }
};

/// Each block sends its results to those that join them, and joins what it was sent. It may end
/// then: nobody reads its shared memory but itself.
template <typename C, bool kPlain>
__device__ __forceinline__ void join_in_cluster(SharedStorage<C>& s, const AttentionParams& p,
                                                const Item& item, const ClusterRoute<C>& route) {
  constexpr int kFours = C::kHeadDim / 4, kChunk = core::Inbox::kChunk;
  constexpr int kMaxSplits = core::Inbox::kMaxSplits;
  const Inbox<C> inbox(s);
  const int all = item.rows * kFours;
  Recipient to = route.recipient;
  for (int index = threadIdx.x; index < all;) {
    float x[4] = {};
    const core::SoftmaxState<float> state =
        join_key_warps<C>(s.results, index / kFours, 4 * (index % kFours), x);
    store_cluster(to.out, x, to.barrier);
    store_cluster(to.state, {state.max, state.sum}, to.barrier);
    index += C::kThreads;
    if (index < all) to = Recipient(inbox, p, item, index);
  }
  const int lane = threadIdx.x % 32;
  Joined joined = route.joined;
#pragma unroll 1
  for (int turn = threadIdx.x / 32; all > joined.piece;) {
    const int column = 4 * (joined.piece % kFours);
    wait(inbox.s_full, 0);
    float4 part[kMaxSplits];
    float max[kMaxSplits], sum[kMaxSplits];
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) {
      const int at = (turn * p.splits + i) * kChunk + lane;
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
      const float weight = fast_exp2(max[i] - base);
      all_states.sum = fmaf(sum[i], weight, all_states.sum);
      const float counted =
          p.plant.is(PlantedBug::combine_double_counts) ? weight * weight : weight;
      x[0] = fmaf(part[i].x, counted, x[0]);
      x[1] = fmaf(part[i].y, counted, x[1]);
      x[2] = fmaf(part[i].z, counted, x[2]);
      x[3] = fmaf(part[i].w, counted, x[3]);
    }
    finish_row(p, joined.row, all_states, x);
    if (!left_out(p, item, joined.row)) {
      assert_row(p, item, joined.row, all_states, x);
      if (column == 0 && p.lse != nullptr) {
        store_lse(p, item, joined.row, lse_of(p, all_states));
      }
      if (kPlain || column < p.v_dim) store_output<C, kPlain>(p, joined.offset, column, x);
    }
    turn += C::kThreads / 32;
    joined = Joined::of_turn<C>(p, item, turn);
  }
}

/// A range past the end of its sequence: nobody waits for it or reads more than this.
__device__ __forceinline__ void leave_nothing(const AttentionParams& p, const Item& item) {
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

__device__ __forceinline__ RowParts parts_of(const AttentionParams& p, const Item& item, int r,
                                             const PartStrides& strides) {
  const int lane = threadIdx.x % 32;
  const std::int64_t first = partial_of(p, item, row_of(p, item, r), 0);
  return {static_cast<const float*>(p.partial_lse) + first + lane * strides.lse,
          static_cast<const float*>(p.partial_out) + first * p.v_dim + 4 * lane};
}

/// A warp joins a row. All that counts is how long it takes one warp: lanes find the weights of a
/// split each while the outputs are on their way.
template <typename C, bool kPlain>
__device__ __forceinline__ void join_row(float* s_weights, const AttentionParams& p,
                                         const Item& item, int r, const RowParts& parts,
                                         const PartStrides& strides) {
  constexpr int kLaneSplits = core::kMaxJoinedSplits / 32;
  constexpr int kAtOnce = C::kOwnKeys ? 16 : 4;
  const int lane = threadIdx.x % 32;
  const int columns = kPlain ? C::kHeadDim : p.v_dim;
  float4 part[kAtOnce];  // as many as registers allow
  const auto load = [&](int first_column, int split) {
    const float* g_out = parts.g_out + first_column + split * strides.out;
    const int left = columns - first_column - 4 * lane;  // may be <= 0
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, g_out += strides.out) {
      if (split + i < item.splits && left > 0) {
        part[i] = load_columns(g_out, 0, kPlain || p.v_dim % 4 == 0 ? 4 : left);
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
  for (const float lse : weight) all.max = max_passing_nan(all.max, lse);
  all.max = warp_max(all.max);
  const float base = core::softmax_base(all.max);
#pragma unroll
  for (int k = 0; k < kLaneSplits; ++k) {
    const bool nothing = weight[k] == core::negative_infinity<float>();
    const float counted = fast_exp2((weight[k] - base) * static_cast<float>(core::kLog2E));
    if (!nothing) all.sum += counted;
    const bool twice = p.plant.is(PlantedBug::combine_double_counts);
    s_weights[lane + 32 * k] = nothing ? kNoWeight : twice ? counted * counted : counted;
  }
  all.sum = warp_sum(all.sum);
  if (p.sinks != nullptr) {
    all.sum += fast_exp2((sink - base) * static_cast<float>(core::kLog2E));
  }
  const float factor = fast_output_factor(all.sum);
  __syncwarp();
  const bool written = !left_out(p, item, row);
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
      core::assert_output(p, item.sequence, item.b, row.head, row.query, x[i]);
    }
    store_output<C, kPlain>(p, output_offset(p, item, row), column, x);
  }
  if (lane == 0 && p.lse != nullptr && written) store_lse(p, item, row, core::combined_lse(all));
  __syncwarp();  // before the next row's weights
}

/// Counts the item's blocks; the last one joins their results. The counter goes back to 0 by
/// itself: it wraps.
template <typename C, bool kPlain>
__device__ __forceinline__ void join_splits(SharedStorage<C>& s, const AttentionParams& p,
                                            const Item& item) {
  const int warp = threadIdx.x / 32;
  // Found out here, while others still write, not when the counter has answered.
  PartStrides strides{core::partial_rows(p), core::partial_rows(p) * p.v_dim};
  RowParts parts = parts_of(p, item, min(warp, item.rows - 1), strides);
  asm volatile("" : "+l"(parts.g_lse), "+l"(parts.g_out), "+l"(strides.lse), "+l"(strides.out));
  __syncthreads();
  if (threadIdx.x == 0) {
    s.last = count_in_order(p.counters + item.index, item.splits - 1) == item.splits - 1u;
  }
  __syncthreads();
  if (!s.last) return;
  constexpr int kWarps = C::kThreads / 32;
  float* s_weights = &s.results.o[0][0][0] + warp * core::kMaxJoinedSplits;
  static_assert(sizeof(s.results.o) >= kWarps * core::kMaxJoinedSplits * sizeof(float));
#pragma unroll 1
  for (int r = warp; r < item.rows; r += kWarps) {
    if (r != warp) parts = parts_of(p, item, r, strides);
    join_row<C, kPlain>(s_weights, p, item, r, parts, strides);
  }
}

/// What follows when the warps have left their results.
template <typename C, bool kPlain>
__device__ __forceinline__ void finish_item(SharedStorage<C>& s, const AttentionParams& p) {
  write_results<C, kPlain>(s.results, p, s.item);
  if (p.splits > 1 && p.counters != nullptr) join_splits<C, kPlain>(s, p, s.item);
}

/// Apart, where its registers would displace some of the loop before; one for both ways, for many
/// rows come here only with splits.
template <typename C>
__device__ __noinline__ void finish_item_apart(SharedStorage<C>& s, const AttentionParams& p) {
  finish_item<C, false>(s, p);
}

}  // namespace flashcore::cuda::sm80
