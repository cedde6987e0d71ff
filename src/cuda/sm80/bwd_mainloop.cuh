// The mainloop of gradients: steps of rows of B for the CTA's rows of A.
#pragma once

#include "cuda/sm80/bwd_plain.cuh"
#include "cuda/sm80/bwd_steps.cuh"

namespace flashcore::cuda::sm80 {

template <typename C, bool kKeysAreRows>
__device__ __forceinline__ float unit_at(const BwdTiles<C>& s, const BackwardParams& p,
                                         const BwdPosition& at) {
  const bool twice = !kKeysAreRows && at.first == 0 && p.fwd.fault.is(InjectedFault::dq_tile_twice);
  return twice ? 2.f * s.work.unit : s.work.unit;
}

/// Turns S into weights in shared memory, or dZ in d_pairs, for any call. Then all operands are
/// finite. An idle warp has no rows.
template <typename C, bool kFastPath, bool kKeysAreRows>
__device__ __forceinline__ void find_weights(AccPairs<C>& pairs, AccPairs<C>& d_pairs,
                                             BwdTiles<C>& s, const BackwardParams& p,
                                             const BwdThread<C>& t, const BwdStep& step, float unit,
                                             int stage, bool idle = false) {
  bool special = false;
  if (!idle) {
    multiply_rows<C>(d_pairs, s.a2, s.b2[C::kStagesB2 == 1 ? 0 : stage], t);
    special = finish_pairs<C, kFastPath, kKeysAreRows>(pairs, d_pairs, s, p, t, step, unit);
  }
  if (__syncthreads_or(special)) {
    clean_operands<C, kKeysAreRows>(s, stage);
    __syncthreads();
  }
}

/// acc1 += dZ B1 and, in KV tiles, acc2 += P B2, over all steps.
template <typename C, bool kFastPath, bool kKeysAreRows, bool kCareful>
__device__ __forceinline__ void run_steps(BwdTiles<C>& s, const BackwardParams& p,
                                          AccGradient<C>& acc1, AccGradient<C>& acc2) {
  BwdLoads<C, kFastPath, kKeysAreRows, kCareful> load(s, p, s.work.steps);
  BwdPosition at{load.steps.first_head, load.steps.begin};
  int stage = 0;
  load_a<C, kFastPath, kKeysAreRows, kCareful>(s, p);
  load.b1(at, stage);
  cp_async_wait<0>();
  __syncthreads();
  load.b2(at, stage);
#pragma unroll 1
  while (!load.ended(at)) {
    const BwdThread<C> t(opaque(threadIdx.x));
    const BwdStep step = step_at<C, kKeysAreRows>(s.work, at);
    const float unit = unit_at<C, kKeysAreRows>(s, p, at);
    load.advance(at);
    AccPairs<C> pairs;
    multiply_rows<C>(pairs, s.a1, s.b1[stage], t);
    cp_async_wait<0>();
    __syncthreads();  // B2 and the statistics have arrived; all warps have done the step before
    load.b1(at, stage ^ 1);
    if constexpr (kCareful) {
      AccPairs<C> d_pairs;
      find_weights<C, kFastPath, kKeysAreRows>(pairs, d_pairs, s, p, t, step, unit, stage);
      if constexpr (kKeysAreRows) multiply_weights<C>(acc2, s.p, s.b2[0], t);
    } else {
      if (!step.all_visible) hide_scores<C, kKeysAreRows>(pairs, s.work, t, step);
      run_plain_step<C, kKeysAreRows>(pairs, s, p, t, unit, acc2);
    }
    cp_async_wait<0>();
    __syncthreads();  // the next B1 has arrived; all warps have stored dZ and read B2
    load.b2(at, stage);
    multiply_weights<C>(acc1, s.dz, s.b1[stage], t);
    stage ^= 1;
  }
  cp_async_wait<0>();
}

/// acc += dZ B1 over all steps, with dZ in registers. One barrier per step.
template <typename C, bool kFastPath, bool kCareful>
__device__ __forceinline__ void run_register_steps(BwdTiles<C>& s, const BackwardParams& p,
                                                   AccGradient<C>& acc) {
  BwdLoads<C, kFastPath, false, kCareful> load(s, p, s.work.steps);
  BwdPosition at{load.steps.first_head, load.steps.begin};
  int stage = 0;
  load_a<C, kFastPath, false, kCareful>(s, p);
  load.b1(at, stage);
  load.b2(at, stage);
#pragma unroll 1
  while (!load.ended(at)) {
    const BwdThread<C> t(opaque(threadIdx.x));
    const BwdStep step = step_at<C, false>(s.work, at);
    const float unit = unit_at<C, false>(s, p, at);
    load.advance(at);
    cp_async_wait<0>();
    __syncthreads();  // the stage has arrived; all warps have read the other one
    load.b1(at, stage ^ 1);
    load.b2(at, stage ^ 1);
    AccPairs<C> pairs;
    if constexpr (kCareful) {
      AccPairs<C> d_pairs;
      const bool idle = !__any_sync(0xffffffffu, t.pair_row0() < s.work.rows_a);
      if (!idle) multiply_rows<C>(pairs, s.a1, s.b1[stage], t);
      find_weights<C, kFastPath, false>(pairs, d_pairs, s, p, t, step, unit, stage, idle);
      if (!idle) multiply_pairs<C>(acc, d_pairs, s.b1[stage], t);
    } else if (warp_sees<C>(s.work, t, step)) {
      multiply_rows<C>(pairs, s.a1, s.b1[stage], t);
      if (!step.all_visible) hide_scores<C, false>(pairs, s.work, t, step);
      run_register_step<C>(pairs, s, p, t, unit, stage, acc);
    }
    stage ^= 1;
  }
  cp_async_wait<0>();
}

template <typename C, bool kFastPath, bool kKeysAreRows, bool kCareful>
__device__ __forceinline__ void run_tile(BwdTiles<C>& s, const BackwardParams& p,
                                         AccGradient<C>& acc1, AccGradient<C>& acc2) {
  if constexpr (C::kWeightsInRegisters) {
    run_register_steps<C, kFastPath, kCareful>(s, p, acc1);
  } else {
    run_steps<C, kFastPath, kKeysAreRows, kCareful>(s, p, acc1, acc2);
  }
}

template <typename C>
__device__ __forceinline__ void add_probes(float& probe, const AccGradient<C>& acc) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int group = 0; group < C::kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 8; ++i) add_probe(probe, acc[m][group][i / 4][i % 4]);
    }
  }
}

/// Sums the gradients of the CTA's rows of A: acc1 of dZ B1, acc2 of P B2. False if plain steps
/// found a sum that is not finite. A number that is not finite in an operand makes one, unless no
/// weight depends on it.
template <typename C, bool kFastPath, bool kKeysAreRows, bool kCareful>
__device__ __forceinline__ bool sum_gradients(BwdTiles<C>& s, const BackwardParams& p,
                                              AccGradient<C>& acc1, AccGradient<C>& acc2) {
  run_tile<C, kFastPath, kKeysAreRows, kCareful>(s, p, acc1, acc2);
  if (kCareful) return true;
  float probe = 0.f;
  add_probes<C>(probe, acc1);
  if constexpr (kKeysAreRows) add_probes<C>(probe, acc2);
  return !__syncthreads_or(probe != 0.f);
}

/// Compute::run<C, kFastPath, kCareful>() computes and stores the gradients of the rows of A. It is
/// false, and stores nothing, if plain steps found a sum that is not finite. Careful steps of the
/// fast path are a function: inlined, they would spill.
template <typename C, typename Compute>
__device__ __noinline__ void compute_carefully(BwdTiles<C>& s, const BackwardParams& p) {
  Compute::template run<C, true, true>(s, p);
}
template <typename C, bool kFastPath, typename Compute>
__device__ __forceinline__ void compute_gradients(BwdTiles<C>& s, const BackwardParams& p) {
  if constexpr (kFastPath) {
    // A scale that is not positive makes no weight 0 of a score of -inf.
    if (plain_scale(p) > 0.f && Compute::template run<C, true, false>(s, p)) return;
    compute_carefully<C, Compute>(s, p);
  } else {
    Compute::template run<C, false, true>(s, p);
  }
}

/// sum += dS of the tile's queries with the keys from first_key on.
template <typename C, bool kFastPath>
__device__ __forceinline__ void add_dbias_step(AccPairs<C>& sum, BwdTiles<C>& s,
                                               const BackwardParams& p, std::int32_t first_key,
                                               std::int32_t end) {
  const BwdSteps steps{first_key, end, s.work.h, 1};
  BwdLoads<C, kFastPath, false, true> load(s, p, steps);
  const BwdPosition at{s.work.h, first_key};
  load_a<C, kFastPath, false, true>(s, p);
  load.b2(at, 0);
  load.b1(at, 0);
  cp_async_wait<0>();
  __syncthreads();
  const BwdThread<C> t(threadIdx.x);
  AccPairs<C> pairs, d_pairs;
  multiply_rows<C>(d_pairs, s.a2, s.b2[0], t);
  multiply_rows<C>(pairs, s.a1, s.b1[0], t);
  BwdStep step = step_at<C, false>(s.work, at);
  step.with_slope = false;
  finish_pairs<C, kFastPath, false>(pairs, d_pairs, s, p, t, step, s.work.unit);
#pragma unroll
  for (int m = 0; m < C::kPairRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kPairColumnTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[m][n][i] += d_pairs[m][n][i];
    }
  }
}

}  // namespace flashcore::cuda::sm80
