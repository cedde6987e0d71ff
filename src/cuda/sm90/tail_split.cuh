// Items whose keys are cut into parts: every part leaves its output and the states of its rows in
// the workspace, and the last one to do so joins all of them, in their order. A warp has 16 rows to
// itself from beginning to end: warps count, and wait for nobody.
#pragma once

#include "cuda/primitives/ptx.cuh"
#include "cuda/sm90/config.cuh"

namespace flashcore::cuda::sm90 {

/// What a warp of a part leaves behind: registers as they are, four of a lane at a time.
template <typename C>
struct WarpPart {
  static constexpr int kQuads = C::kHeadDim / 8;
  float4 output[kQuads][32];
  core::SoftmaxState<float> states[16];
};

/// A warp's number among those that compute: asked for again, since registers are few.
__device__ __forceinline__ int computing_warp() { return opaque(threadIdx.x) / 32 - 4; }

template <typename C>
__device__ __forceinline__ WarpPart<C>& warp_part(const Params& params, const WorkTile& item,
                                                  int part) {
  constexpr int kWarps = 4 * C::kConsumers;
  static_assert(sizeof(WarpPart<C>) * kWarps == C::kShape.part_bytes());
  const int index = (item.cut_item * params.tail.parts() + part) * kWarps + computing_warp();
  return static_cast<WarpPart<C>*>(params.parts)[index];
}

/// Leaves the warp's part of an item. True: it was the last, and o and s.ended are the whole item's
/// now.
template <typename C>
__device__ __forceinline__ bool reduce_tail_splits(AccO<C>& acc_o, SharedStorage<C>& s,
                                                   const Params& params, const WorkTile& item,
                                                   const Thread<C>& t) {
  using Part = WarpPart<C>;
  const int parts = params.tail.parts();
  core::SoftmaxState<float>* s_states = s.final_stats + 16 * computing_warp();
  {
    Part& g_part = warp_part<C>(params, item, item.part);
#pragma unroll
    for (int i = 0; i < Part::kQuads; ++i) {
      g_part.output[i][t.lane] = {acc_o[4 * i], acc_o[4 * i + 1], acc_o[4 * i + 2],
                                  acc_o[4 * i + 3]};
    }
    if (t.lane < 16) g_part.states[t.lane] = s_states[t.lane];
  }
  __syncwarp();
  std::uint32_t before = 0;
  if (t.lane == 0) {
    const int counter = item.cut_item * 4 * C::kConsumers + computing_warp();
    before = atomic_inc_acq_rel(params.tail_arrivals + counter, parts - 1);
  }
  if (__shfl_sync(0xffffffffu, before, 0) != parts - 1u) return false;

  const int row = t.lane / 4;  // and 8 below it
  core::SoftmaxState<float> all[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float max = core::negative_infinity<float>();
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      max = max_ignore_nan(max, warp_part<C>(params, item, part).states[row + 8 * half].max);
    }
    all[half] = {max, 0.f};
  }
#pragma unroll
  for (float& x : acc_o) x = 0.f;
#pragma unroll 1
  for (int part = 0; part < parts; ++part) {
    const Part& g_part = warp_part<C>(params, item, part);
    float weight[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const core::SoftmaxState<float> own = g_part.states[row + 8 * half];
      weight[half] = core::exp_scalar(own.max - core::softmax_base(all[half].max));
      all[half].sum = core::add_tile_sum(own.sum, weight[half], all[half].sum);
    }
#pragma unroll
    for (int i = 0; i < Part::kQuads; ++i) {
      const float4 x = g_part.output[i][t.lane];
      acc_o[4 * i] = fmaf(x.x, weight[0], acc_o[4 * i]);
      acc_o[4 * i + 1] = fmaf(x.y, weight[0], acc_o[4 * i + 1]);
      acc_o[4 * i + 2] = fmaf(x.z, weight[1], acc_o[4 * i + 2]);
      acc_o[4 * i + 3] = fmaf(x.w, weight[1], acc_o[4 * i + 3]);
    }
  }
  __syncwarp();
  if (t.lane % 4 == 0) {
    s_states[row] = all[0];
    s_states[row + 8] = all[1];
  }
  __syncwarp();
  return true;
}

}  // namespace flashcore::cuda::sm90
