// The steps of a work tile, and their loads.
#pragma once

#include "cuda/sm80/bwd_load.cuh"
#include "cuda/sm80/bwd_score.cuh"

namespace flashcore::cuda::sm80 {

/// A step of a work tile.
struct BwdPosition {
  std::int32_t head, first;
};

/// Loads of the steps, in order. Past the last one they load nothing, but commit a group.
template <typename C, bool kFastPath, bool kKeysAreRows, bool kCareful>
struct BwdLoads {
  using T = typename C::Element;
  using Rows = BwdRows<T>;
  BwdTiles<C>& s;
  const BackwardParams& p;
  BwdSteps steps;
  // The thread's first chunks of the next step of B1 and B2. Finding them anew takes longer. Code
  // for sm_80 has no registers for those of dkdv tiles.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr bool kKeepsChunks = kFastPath && !kCareful && !kKeysAreRows;
#else
  static constexpr bool kKeepsChunks = kFastPath && !kCareful;
#endif
  const T *g_b1, *g_b2;

  __device__ __forceinline__ BwdLoads(BwdTiles<C>& tiles, const BackwardParams& params,
                                      const BwdSteps& all)
      : s(tiles), p(params), steps(all) {
    if (steps.heads == 0) steps.end = steps.begin;
    if constexpr (!kKeysAreRows && kKeepsChunks) {
      const BwdCopies<C, C::kStep> copies;
      g_b1 = copies.first_chunk(rows_b1(steps.first_head), steps.begin);
      g_b2 = copies.first_chunk(rows_b2(steps.first_head), steps.begin);
    }
  }
  // A query tile has one head.
  __device__ __forceinline__ bool ended(const BwdPosition& at) const {
    return kKeysAreRows ? at.head >= steps.first_head + steps.heads : at.first >= steps.end;
  }
  __device__ __forceinline__ void advance(BwdPosition& at) const {
    at.first += C::kStep;
    if (!kKeysAreRows || at.first < steps.end) return;
    at.first = steps.begin;
    ++at.head;
  }
  __device__ __forceinline__ Rows rows_b1(std::int32_t head) const {
    if constexpr (kKeysAreRows) return rows_of_q<C, kFastPath>(p, s.work, head);
    return rows_of_k<C, kFastPath>(p, s.work);
  }
  __device__ __forceinline__ Rows rows_b2(std::int32_t head) const {
    if constexpr (kKeysAreRows) return rows_of_dout<C, kFastPath>(p, s.work, head);
    return rows_of_v<C, kFastPath>(p, s.work);
  }
  /// rows_of_head() gives all rows of the operand.
  template <typename RowsOfHead>
  __device__ __forceinline__ void tile(T* s_b, RowsOfHead rows_of_head, std::int64_t row_stride,
                                       int columns, const T*& g_chunk,
                                       const BwdPosition& at) const {
    const int rows = min(C::kStep, steps.end - at.first);
    if constexpr (kKeepsChunks) {
      if (kKeysAreRows && at.first == steps.begin) {
        g_chunk = BwdCopies<C, C::kStep>().first_chunk(rows_of_head(), at.first);
      }
      load_bwd_chunks<C, C::kStep>(s_b, g_chunk, row_stride, columns, rows);
      g_chunk += C::kStep * row_stride;
    } else {
      load_bwd_tile<C, C::kStep, kFastPath>(s_b, rows_of_head(), at.first, rows);
    }
  }
  /// Q or K.
  __device__ __forceinline__ void b1(const BwdPosition& at, int stage) {
    if (!ended(at)) {
      const auto& strides = kKeysAreRows ? p.fwd.q_strides : p.fwd.k_strides;
      tile(
          s.b1[stage], [&] { return rows_b1(at.head); }, strides.row, p.fwd.head_dim, g_b1, at);
    }
    cp_async_commit();
  }
  /// dO and the statistics of queries, or V.
  __device__ __forceinline__ void b2(const BwdPosition& at, int stage) {
    if (!ended(at)) {
      T* s_b = s.b2[C::kStagesB2 == 1 ? 0 : stage];
      const auto& strides = kKeysAreRows ? p.dout_strides : p.fwd.v_strides;
      tile(
          s_b, [&] { return rows_b2(at.head); }, strides.row, p.fwd.v_dim, g_b2, at);
      if constexpr (kKeysAreRows) {
        load_bwd_stats<C, C::kStep, kCareful>(s, p, at.head, at.first, steps.end - at.first);
      }
    }
    cp_async_commit();
  }
};

/// Loads the CTA's rows of A: K and V, or Q, dO and the statistics of queries.
template <typename C, bool kFastPath, bool kKeysAreRows, bool kCareful>
__device__ __forceinline__ void load_a(BwdTiles<C>& s, const BackwardParams& p) {
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
    load_bwd_stats<C, C::kTile, kCareful>(s, p, work.h, work.first_a, work.rows_a);
  }
}

/// all_visible needs whole tiles: rows past the end see no key.
template <typename C, bool kKeysAreRows>
__device__ __forceinline__ BwdStep step_at(const BwdWork& work, const BwdPosition& at) {
  const std::int32_t query = kKeysAreRows ? at.first : work.first_a;
  const std::int32_t key = kKeysAreRows ? work.first_a : at.first;
  const bool plain = work.plain.begin <= at.first && at.first + C::kStep <= work.plain.end;
  return {at.head, query, key, plain, true};
}

}  // namespace flashcore::cuda::sm80
