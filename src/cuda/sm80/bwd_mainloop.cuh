// The mainloop of gradients: steps of rows of B for the CTA's rows of A.
#pragma once

#include "cuda/sm80/bwd_load.cuh"
#include "cuda/sm80/bwd_mma.cuh"
#include "cuda/sm80/bwd_score.cuh"

namespace flashcore::cuda::sm80 {

/// A step of a work tile.
struct BwdPosition {
  std::int32_t head, first;

  template <typename C>
  __device__ __forceinline__ void advance(const BwdSteps& steps) {
    first += C::kStep;
    if (first < steps.end) return;
    first = steps.begin;
    ++head;
  }
};

/// Loads of a step. Past the last one they load nothing, but commit a group.
template <typename C, bool kFastPath, bool kKeysAreRows>
struct BwdLoads {
  BwdStorage<C>& s;
  const BackwardParams& p;
  const BwdSteps& steps;

  __device__ __forceinline__ bool ended(const BwdPosition& at) const {
    return at.head >= steps.first_head + steps.heads;
  }
  __device__ __forceinline__ int rows(const BwdPosition& at) const {
    return min(C::kStep, steps.end - at.first);
  }
  /// Q and the statistics of queries, or K.
  __device__ __forceinline__ void b1(const BwdPosition& at) const {
    if (!ended(at)) {
      const int count = rows(at);
      if constexpr (kKeysAreRows) {
        load_bwd_tile<C, C::kStep, kFastPath>(s.b1, rows_of_q<C, kFastPath>(p, s.work, at.head),
                                              at.first, count);
        load_bwd_stats<C, C::kStep>(s, p, at.head, at.first, count);
      } else {
        load_bwd_tile<C, C::kStep, kFastPath>(s.b1, rows_of_k<C, kFastPath>(p, s.work), at.first,
                                              count);
      }
    }
    cp_async_commit();
  }
  /// dO or V.
  __device__ __forceinline__ void b2(const BwdPosition& at) const {
    if (!ended(at)) {
      const int count = rows(at);
      if constexpr (kKeysAreRows) {
        load_bwd_tile<C, C::kStep, kFastPath>(s.b2, rows_of_dout<C, kFastPath>(p, s.work, at.head),
                                              at.first, count);
      } else {
        load_bwd_tile<C, C::kStep, kFastPath>(s.b2, rows_of_v<C, kFastPath>(p, s.work), at.first,
                                              count);
      }
    }
    cp_async_commit();
  }
};

/// Loads the CTA's rows of A: K and V, or Q, dO and the statistics of queries.
template <typename C, bool kFastPath, bool kKeysAreRows>
__device__ __forceinline__ void load_a(BwdStorage<C>& s, const BackwardParams& p) {
  const BwdWork& work = s.work;
  if constexpr (kKeysAreRows) {
    load_bwd_tile<C, C::kTile, kFastPath>(s.a1, rows_of_k<C, kFastPath>(p, work), work.first_a,
                                          work.rows_a);
    load_bwd_tile<C, C::kTile, kFastPath>(s.a2, rows_of_v<C, kFastPath>(p, work), work.first_a,
                                          work.rows_a);
  } else {
    load_bwd_tile<C, C::kTile, kFastPath>(s.a1, rows_of_q<C, kFastPath>(p, work, work.h),
                                          work.first_a, work.rows_a);
    load_bwd_tile<C, C::kTile, kFastPath>(s.a2, rows_of_dout<C, kFastPath>(p, work, work.h),
                                          work.first_a, work.rows_a);
    load_bwd_stats<C, C::kTile>(s, p, work.h, work.first_a, work.rows_a);
  }
}

/// all_visible needs whole tiles: rows past the end see no key.
template <typename C, bool kKeysAreRows>
__device__ __forceinline__ BwdStep step_at(const BwdWork& work, const BwdPosition& at) {
  const std::int32_t query = kKeysAreRows ? at.first : work.first_a;
  const std::int32_t key = kKeysAreRows ? work.first_a : at.first;
  const int queries = kKeysAreRows ? C::kStep : C::kTile, keys = kKeysAreRows ? C::kTile : C::kStep;
  const KeyRange all = core::keys_seen_by_all(work.seq.mask, query, query + queries - 1);
  return {at.head, query, key,
          query + queries <= work.seq.q_len && all.begin <= key && key + keys <= all.end, true};
}

/// acc1 += dZ B1 and, in KV tiles, acc2 += P B2, over all steps.
template <typename C, bool kFastPath, bool kKeysAreRows>
__device__ __forceinline__ void run_steps(BwdStorage<C>& s, const BackwardParams& p,
                                          AccGradient<C>& acc1, AccGradient<C>& acc2) {
  const BwdLoads<C, kFastPath, kKeysAreRows> load{s, p, s.work.steps};
  BwdPosition at{load.steps.first_head, load.steps.begin};
  load_a<C, kFastPath, kKeysAreRows>(s, p);
  load.b2(at);
  cp_async_wait<0>();
  __syncthreads();
  load.b1(at);
#pragma unroll 1
  while (!load.ended(at)) {
    const BwdThread<C> t(opaque(threadIdx.x));
    AccPairs<C> pairs, d_pairs;
    multiply_rows<C>(d_pairs, s.a2, s.b2, t);
    cp_async_wait<0>();
    __syncthreads();  // B1 and the statistics have arrived
    multiply_rows<C>(pairs, s.a1, s.b1, t);
    const BwdStep step = step_at<C, kKeysAreRows>(s.work, at);
    const bool special = finish_pairs<C, kFastPath, kKeysAreRows>(pairs, d_pairs, s, p, t, step);
    if (__syncthreads_or(special)) {
      clean_operands<C, kKeysAreRows>(s);
      __syncthreads();
    }
    const bool twice = at.first == 0 && p.fwd.fault.is(InjectedFault::dq_tile_twice);
    at.advance<C>(load.steps);
    if constexpr (kKeysAreRows) {
      multiply_weights<C>(acc2, s.p, s.b2, t);
      __syncthreads();  // all warps have read B2
    }
    load.b2(at);
    multiply_weights<C>(acc1, s.dz, s.b1, t);
    if (!kKeysAreRows && twice) multiply_weights<C>(acc1, s.dz, s.b1, t);
    cp_async_wait<0>();
    __syncthreads();  // B2 has arrived; all warps have read B1 and the weights
    load.b1(at);
  }
  cp_async_wait<0>();
}

/// sum += dS of the tile's queries with the keys from first_key on.
template <typename C, bool kFastPath>
__device__ __forceinline__ void add_dbias_step(AccPairs<C>& sum, BwdStorage<C>& s,
                                               const BackwardParams& p, std::int32_t first_key,
                                               std::int32_t end) {
  const BwdSteps steps{first_key, end, s.work.h, 1};
  const BwdLoads<C, kFastPath, false> load{s, p, steps};
  const BwdPosition at{s.work.h, first_key};
  load_a<C, kFastPath, false>(s, p);
  load.b2(at);
  load.b1(at);
  cp_async_wait<0>();
  __syncthreads();
  const BwdThread<C> t(threadIdx.x);
  AccPairs<C> pairs, d_pairs;
  multiply_rows<C>(d_pairs, s.a2, s.b2, t);
  multiply_rows<C>(pairs, s.a1, s.b1, t);
  BwdStep step = step_at<C, false>(s.work, at);
  step.with_slope = false;
  finish_pairs<C, kFastPath, false>(pairs, d_pairs, s, p, t, step);
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
