// Joining the key ranges of an item. Where its blocks are a cluster (sm_90, up to 8) they read each
// other's results in shared memory. Otherwise the last block to arrive reads all partial results
// from the workspace; they come from other SMs, so they are read past the L1 cache. Waiting is all
// that either does, so many loads are under way at once.
#pragma once

#include "core/combine.h"
#include "cuda/sm80/results.cuh"

namespace flashcore::cuda::sm80 {

/// Four columns of one row, over all splits in ascending order.
template <typename C, bool kPlain>
__device__ __forceinline__ void join_columns(const AttentionParams& p, const Item& item,
                                             const Row& row, int column) {
  constexpr int kAtOnce = 8;
  const std::int64_t rows = core::partial_rows(p);
  const std::int64_t first = partial_of(p, item, row, 0);
  const float* g_lse = static_cast<const float*>(p.partial_lse) + first;
  const float* g_out = static_cast<const float*>(p.partial_out) + first * p.v_dim;
  core::SoftmaxState<float> all{core::negative_infinity<float>(), 0.f};
  if (p.sinks != nullptr) all = {p.sinks[row.head * p.sinks_stride], 1.f};
  float x[4] = {};
#pragma unroll 1
  for (int begin = 0; begin < item.splits; begin += kAtOnce) {
    float lse[kAtOnce];
    float4 part[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      lse[i] = core::negative_infinity<float>();
      part[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (begin + i < item.splits) {
        lse[i] = __ldcg(g_lse + (begin + i) * rows);
        part[i] = load_columns(g_out + (begin + i) * rows * p.v_dim, column,
                               kPlain ? C::kHeadDim : p.v_dim);
      }
    }
    float max = all.max;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) max = max_passing_nan(max, lse[i]);
    const float rescale = core::combine_exp(all.max, max);
    all.max = max;
    all.sum *= rescale;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] *= rescale;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // A part that saw no key left nothing in its output.
      if (lse[i] == core::negative_infinity<float>()) continue;
      const float weight = core::combine_exp(lse[i], max);
      all.sum += weight;
      const float counted =
          p.plant.is(PlantedBug::combine_double_counts) ? weight * weight : weight;
      x[0] = fmaf(counted, part[i].x, x[0]);
      x[1] = fmaf(counted, part[i].y, x[1]);
      x[2] = fmaf(counted, part[i].z, x[2]);
      x[3] = fmaf(counted, part[i].w, x[3]);
    }
  }
  const float factor = core::output_factor(all.sum);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] *= factor;
  for (const float out : x) {
    core::assert_output(p, item.sequence, item.b, row.head, row.query, out);
  }
  if (column == 0 && p.lse != nullptr) store_lse(p, item, row, core::combined_lse(all));
  if (kPlain || column < p.v_dim) store_output<C, kPlain>(p, item, row, column, x);
}

inline constexpr int kMaxCluster = 8;  // what every sm_90 can place

/// Each block of the cluster joins its share of the item's rows and columns.
template <typename C, bool kPlain>
__device__ __forceinline__ void join_in_cluster(SharedStorage<C>& s, const AttentionParams& p,
                                                const Item& item) {
  constexpr int kFours = C::kHeadDim / 4;
  for (int index = threadIdx.x; index < item.rows * kFours; index += C::kThreads) {
    const int r = index / kFours, column = 4 * (index % kFours);
    float x[4] = {};
    const core::SoftmaxState<float> state = join_key_warps<C>(s.results, r, column, x);
    // Nobody else reads or writes these columns of o[0].
    *reinterpret_cast<float4*>(&s.results.o[0][r][column]) = make_float4(x[0], x[1], x[2], x[3]);
    if (column == 0) s.results.joined[r] = state;
  }
  sync_cluster();
  const int share = (item.rows * kFours + p.splits - 1) / p.splits;
  const int end = min((item.split + 1) * share, item.rows * kFours);
#pragma unroll 1
  for (int index = item.split * share + threadIdx.x; index < end; index += C::kThreads) {
    const int r = index / kFours, column = 4 * (index % kFours);
    float4 part[kMaxCluster];
    float2 state[kMaxCluster];
#pragma unroll
    for (int i = 0; i < kMaxCluster; ++i) {
      state[i] = make_float2(core::negative_infinity<float>(), 0.f);
      part[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (i < p.splits) {
        state[i] = load_cluster_2(cluster_address(&s.results.joined[r], i));
        part[i] = load_cluster_4(cluster_address(&s.results.o[0][r][column], i));
      }
    }
    core::SoftmaxState<float> all{core::negative_infinity<float>(), 0.f};
#pragma unroll
    for (int i = 0; i < kMaxCluster; ++i) all.max = max_passing_nan(all.max, state[i].x);
    const float base = core::softmax_base(all.max);
    float x[4] = {};
#pragma unroll
    for (int i = 0; i < kMaxCluster; ++i) {
      const float weight = fast_exp2(state[i].x - base);
      all.sum = fmaf(state[i].y, weight, all.sum);
      const float counted =
          p.plant.is(PlantedBug::combine_double_counts) ? weight * weight : weight;
      x[0] = fmaf(part[i].x, counted, x[0]);
      x[1] = fmaf(part[i].y, counted, x[1]);
      x[2] = fmaf(part[i].z, counted, x[2]);
      x[3] = fmaf(part[i].w, counted, x[3]);
    }
    const Row row = row_of(p, item, r);
    const float factor = finish_state(p, row, all);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] *= factor;
    assert_row(p, item, row, all, x);
    if (left_out(p, item, row)) continue;
    if (column == 0 && p.lse != nullptr) store_lse(p, item, row, lse_of(p, all));
    if (kPlain || column < p.v_dim) store_output<C, kPlain>(p, item, row, column, x);
  }
  sync_cluster();  // nobody leaves while its shared memory is read
}

/// A range past the end of its sequence: nobody waits for it or reads more than this.
__device__ __forceinline__ void leave_nothing(const AttentionParams& p, const Item& item) {
  for (int r = threadIdx.x; r < item.rows; r += blockDim.x) {
    static_cast<float*>(p.partial_lse)[partial_of(p, item, row_of(p, item, r), item.split)] =
        core::negative_infinity<float>();
  }
}

/// Counts the item's blocks; the last one joins their results. The counter goes back to 0 by
/// itself: it wraps.
template <typename C, bool kPlain>
__device__ __forceinline__ void join_splits(SharedStorage<C>& s, const AttentionParams& p,
                                            const Item& item) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // the block's results are visible before the counter moves
    s.last = atomicInc(p.counters + item.index, item.splits - 1) == item.splits - 1;
    __threadfence();
  }
  __syncthreads();
  if (!s.last) return;
  constexpr int kFours = C::kHeadDim / 4;
#pragma unroll 1
  for (int index = threadIdx.x; index < item.rows * kFours; index += C::kThreads) {
    const Row row = row_of(p, item, index / kFours);
    if (!left_out(p, item, row)) join_columns<C, kPlain>(p, item, row, 4 * (index % kFours));
  }
}

}  // namespace flashcore::cuda::sm80
