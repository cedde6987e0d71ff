// Epilogue of gradients: scales dK, dV or dQ and stores them straight from registers. Every row is
// written, those without a visible pair as 0.
#pragma once

#include "core/row_offset.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/sm90/bwd_rows.cuh"
#include "cuda/sm90/epilogue.cuh"

namespace flashcore::cuda::sm90 {

/// Where a gradient is stored.
struct GradientRows {
  void* g_to;
  core::Element element;  // the type of the inputs or f32
  std::int64_t first;     // element of row 0 of the tile
  std::int64_t stride;
  int rows;     // that have sums
  int written;  // up to here the others are 0
};

/// Stores a thread's rows of a gradient.
template <typename C, int kSums>
__device__ __forceinline__ void store_gradient(const float (&acc)[kSums], const GradientRows& to,
                                               int columns, float scale, const Thread<C>& t) {
  using Element = typename C::Element;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = t.row(half);
    const bool has_sum = row < to.rows;
    const std::int64_t at = to.first + row * to.stride;
    const auto value = [&](int n, int i) {
      return has_sum ? acc[4 * n + 2 * half + i] * scale : 0.f;
    };
    if (C::kF32Gradients && to.element == core::Element::f32) {
      store_f32_row<C, 2 * kSums>(static_cast<float*>(to.g_to) + at, row < to.written, columns, t,
                                  value);
    } else {
      store_row<C, 2 * kSums>(static_cast<Element*>(to.g_to) + at, row < to.written, columns, t,
                              value);
    }
  }
}

/// Stores dK and dV, or the one that Steps sums.
template <typename C, typename Steps>
__device__ __forceinline__ void store_dkdv(const float (&acc_dk)[C::kHeadDim / 2],
                                           const float (&acc_dv)[C::kVDim / 2],
                                           const core::BackwardParams& p, const BwdWorkTile& work,
                                           const Thread<C>& t) {
  const AttentionParams& f = p.fwd;
  const float ds_scale = C::kScalesDs ? core::ds_unit(p, work.b, work.head) : 1.f;
  const int rows = work.tiles > 0 ? work.rows : 0;
  // Dense rows past the last key are written here, varlen rows are zero already.
  const bool whole = f.cu_seqlens_k == nullptr && !f.fault.is(InjectedFault::dk_tail_unwritten);
  const int written = whole ? f.kv_len - work.first_row : work.rows;
  const auto store = [&](const auto& acc, void* g_to, core::Element element,
                         const core::Strides& strides, int columns, float scale) {
    if (g_to == nullptr) return;
    const std::int64_t first = core::row_offset(
        strides, work.b, work.head, static_cast<std::int64_t>(work.seq.k_row) + work.first_row);
    store_gradient<C>(acc, {g_to, element, first, strides.row, rows, written}, columns, scale, t);
  };
  const auto scale = static_cast<float>(p.scale);
  const bool twice = f.fault.is(InjectedFault::dk_scale_twice);
  if constexpr (Steps::kHasDx) {
    store(acc_dk, p.dk, p.dk_element, p.dk_strides, f.head_dim,
          (twice ? scale * scale : scale) / ds_scale);
  }
  if constexpr (Steps::kHasDv) store(acc_dv, p.dv, p.dv_element, p.dv_strides, f.v_dim, 1.f);
}

template <typename C>
__device__ __forceinline__ void store_dq(const float (&acc_dq)[C::kHeadDim / 2],
                                         const core::BackwardParams& p, const BwdWorkTile& work,
                                         const Thread<C>& t, float ds_scale) {
  const AttentionParams& f = p.fwd;
  const bool unscaled = f.fault.is(InjectedFault::dq_scale_missing);
  const std::int64_t first = core::row_offset(
      p.dq_strides, work.b, work.head, static_cast<std::int64_t>(work.seq.q_row) + work.first_row);
  const int rows = work.tiles > 0 ? work.rows : 0;
  store_gradient<C>(acc_dq, {p.dq, p.dq_element, first, p.dq_strides.row, rows, work.rows},
                    f.head_dim, (unscaled ? 1.f : static_cast<float>(p.scale)) / ds_scale, t);
}

}  // namespace flashcore::cuda::sm90
