// Tail splits: tiles of the last partial wave that are split along the keys. Every split writes its
// output and row statistics to the workspace; the last one to arrive reduces all of them in order.
// A warp owns 16 rows from beginning to end, so warps count arrivals and never wait.
#pragma once

#include "cuda/primitives/compiler.cuh"
#include "cuda/primitives/memory.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm90/config.cuh"

namespace flashcore::cuda::sm90 {

/// A warp's partial result: its accumulators, four registers of a lane at a time.
template <typename C>
struct WarpPartial {
  static constexpr int kQuads = C::kHeadDim / 8;
  float4 output[kQuads][32];
  core::SoftmaxState<float> row_stats[16];
};

/// Index of the consumer warp. Recomputed, because registers are few.
__device__ __forceinline__ int consumer_warp() { return opaque(threadIdx.x) / 32 - 4; }

template <typename C>
__device__ __forceinline__ WarpPartial<C>& warp_partial(const Params& params, const WorkTile& work,
                                                        int split) {
  constexpr int kWarps = 4 * C::kConsumers;
  static_assert(sizeof(WarpPartial<C>) * kWarps == C::kShape.partial_bytes());
  const int index = (work.tail_index * params.tail.splits() + split) * kWarps + consumer_warp();
  return static_cast<WarpPartial<C>*>(params.tail_partials)[index];
}

/// Stores the warp's split of a tile. True if it was the last: acc_o and s.final_stats then cover
/// all keys.
template <typename C>
__device__ __forceinline__ bool reduce_tail_splits(AccO<C>& acc_o, SharedStorage<C>& s,
                                                   const Params& params, const WorkTile& work,
                                                   const Thread<C>& t) {
  using Partial = WarpPartial<C>;
  const int splits = params.tail.splits();
  core::SoftmaxState<float>* s_stats = s.final_stats + 16 * consumer_warp();
  {
    Partial& g_own = warp_partial<C>(params, work, work.tail_split);
#pragma unroll
    for (int i = 0; i < Partial::kQuads; ++i) {
      g_own.output[i][t.lane] = {acc_o[4 * i], acc_o[4 * i + 1], acc_o[4 * i + 2],
                                 acc_o[4 * i + 3]};
    }
    if (t.lane < 16) g_own.row_stats[t.lane] = s_stats[t.lane];
  }
  __syncwarp();
  std::uint32_t before = 0;
  if (t.lane == 0) {
    const int counter = work.tail_index * 4 * C::kConsumers + consumer_warp();
    before = atomic_inc_acq_rel(params.tail_arrivals + counter, splits - 1);
  }
  if (__shfl_sync(0xffffffffu, before, 0) != splits - 1u) return false;

  const int row = t.lane / 4;  // and row + 8
  core::SoftmaxState<float> all[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float max = core::negative_infinity<float>();
#pragma unroll 1
    for (int split = 0; split < splits; ++split) {
      max = max_ignore_nan(max, warp_partial<C>(params, work, split).row_stats[row + 8 * half].max);
    }
    all[half] = {max, 0.f};
  }
#pragma unroll
  for (float& x : acc_o) x = 0.f;
#pragma unroll 1
  for (int split = 0; split < splits; ++split) {
    const Partial& g_partial = warp_partial<C>(params, work, split);
    float weight[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const core::SoftmaxState<float> own = g_partial.row_stats[row + 8 * half];
      weight[half] = core::partial_weight(own.max, all[half].max);
      all[half].sum = core::add_tile_sum(own.sum, weight[half], all[half].sum);
    }
#pragma unroll
    for (int i = 0; i < Partial::kQuads; ++i) {
      const float4 x = g_partial.output[i][t.lane];
      acc_o[4 * i] = fmaf(x.x, weight[0], acc_o[4 * i]);
      acc_o[4 * i + 1] = fmaf(x.y, weight[0], acc_o[4 * i + 1]);
      acc_o[4 * i + 2] = fmaf(x.z, weight[1], acc_o[4 * i + 2]);
      acc_o[4 * i + 3] = fmaf(x.w, weight[1], acc_o[4 * i + 3]);
    }
  }
  __syncwarp();
  if (t.lane % 4 == 0) {
    s_stats[row] = all[0];
    s_stats[row + 8] = all[1];
  }
  __syncwarp();
  return true;
}

}  // namespace flashcore::cuda::sm90
