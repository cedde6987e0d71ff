// Epilogue: normalises O and stores output and LSE straight from registers.
#pragma once

#include "core/assert.h"
#include "core/row_offset.h"
#include "cuda/primitives/compiler.cuh"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm90/softmax.cuh"

namespace flashcore::cuda::sm90 {

/// Offset of a query's row in the output or the LSE, in elements.
template <typename C>
__device__ __forceinline__ std::int64_t query_offset(const core::Strides& strides,
                                                     const WorkTile& work, const Thread<C>& t,
                                                     std::int32_t query) {
  return core::row_offset(strides, work.b, head_of(work, t),
                          static_cast<std::int64_t>(work.seq.q_row) + query);
}

/// Stores an f32 row of kColumns columns if `written`. A quad writes whole 32-byte sectors.
template <typename C, int kColumns, typename Value>
__device__ __forceinline__ void store_f32_row(float* g_row, bool written, int v_dim,
                                              const Thread<C>& t, Value value) {
  // fp8: a lane has four adjacent columns of two n-tiles (core::column_of_row).
  const int column = opaque((C::kFp8 ? 4 : 2) * (t.lane % 4));
#pragma unroll
  for (int n = 0; n < kColumns / 8; n += 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first = 8 * n + (C::kFp8 ? 2 : 8) * i;
      const float2 x = C::kFp8 ? make_float2(value(n, i), value(n + 1, i))
                               : make_float2(value(n + i, 0), value(n + i, 1));
      if (written && first + column < v_dim) {
        *reinterpret_cast<float2*>(g_row + first + column) = x;
      }
    }
  }
}

/// Stores a row of kColumns columns if `written`.
template <typename C, int kColumns = C::kHeadDim, typename Value>
__device__ __forceinline__ void store_row(typename C::Element* g_row, bool written, int v_dim,
                                          const Thread<C>& t, Value value) {
  using T = typename C::Element;
  if constexpr (C::kFp8) {  // a lane has four adjacent columns (core::column_of_row)
    const int column = opaque(4 * (t.lane % 4));
#pragma unroll
    for (int n = 0; n < kColumns / 8; n += 2) {
      const uint2 x = {pack<T>(value(n, 0), value(n + 1, 0)),
                       pack<T>(value(n, 1), value(n + 1, 1))};
      if (written && 8 * n + column < v_dim) {
        *reinterpret_cast<uint2*>(g_row + 8 * n + column) = x;
      }
    }
  } else {
    // Neighbouring lanes exchange columns, so that each has four adjacent ones and a quad writes a
    // whole 32-byte sector. Lanes 0 and 2 of a quad take columns 0-3 and 4-7 of the first n-tile,
    // lanes 1 and 3 those of the second.
    const bool odd = t.lane % 2 != 0;
    const int column = opaque(8 * (t.lane % 2) + 4 * (t.lane % 4 / 2));
#pragma unroll
    for (int n = 0; n < kColumns / 8; n += 2) {
      const std::uint32_t x[2] = {pack<T>(value(n, 0), value(n, 1)),
                                  pack<T>(value(n + 1, 0), value(n + 1, 1))};
      const std::uint32_t theirs = __shfl_xor_sync(0xffffffffu, odd ? x[0] : x[1], 1);
      if (written && 8 * n + column < v_dim) {
        *reinterpret_cast<uint2*>(g_row + 8 * n + column) =
            odd ? make_uint2(theirs, x[1]) : make_uint2(x[0], theirs);
      }
    }
  }
}

/// v_scale: per-head scale of V.
template <typename C, Path kPath>
__device__ __forceinline__ void store_output(AccO<C>& acc_o, const SharedStorage<C>& s,
                                             const AttentionParams& p, const WorkTile& work,
                                             const Thread<C>& t, float v_scale = 1.f) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = t.row(half);
    const std::int32_t query = query_of(work, t, half);
    const core::SoftmaxState<float> state = s.final_stats[r];
    if (__any_sync(0xffffffffu, state.sum == 0.f)) {  // rare; one branch for the warp
#pragma unroll
      for (int n = 0; n < C::kHeadDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = acc_o[4 * n + 2 * half + i];
          x = core::output_of_keys(x, state.sum);
        }
      }
    }
    const auto final =
        core::finalize_row<FastMath>(state, core::sink_of(p, head_of(work, t), true), p.fault);
    const float factor = final.factor * v_scale;
    const bool fault_skips_row =
        p.fault.is(InjectedFault::row_not_written) && query == work.seq.q_len - 1;
    const bool written = has_row(work, t, half) && !fault_skips_row;
    if (written) {
      const float lse = p.lse != nullptr ? final.lse(p.fault) : 0.f;
      core::assert_row_state(p, work.seq, work.b, head_of(work, t), query, final.state, lse);
      if (p.lse != nullptr && t.lane % 4 == 0) {
        static_cast<float*>(p.lse)[query_offset(p.lse_strides, work, t, query)] = lse;
      }
    }
    const auto value = [&](int n, int i) {
      // Never -0: a tile hidden from the row, which other rows may need, turns -0 into 0.
      const float x = fmaf(acc_o[4 * n + 2 * half + i], factor, 0.f);
      if (written) {
        core::assert_output(p, work.seq, work.b, head_of(work, t), query, x);
      }
      return x;
    };
    // One pointer for both types: registers are few.
    const bool is_f32 = kPath != Path::plain && p.out_element == core::Element::f32;
    char* g_row =
        static_cast<char*>(p.out) + query_offset(p.out_strides, work, t, query) * (is_f32 ? 4 : 2);
    if (is_f32) {
      store_f32_row<C, C::kHeadDim>(reinterpret_cast<float*>(g_row), written, p.v_dim, t, value);
    } else {
      store_row<C>(reinterpret_cast<typename C::Element*>(g_row), written, p.v_dim, t, value);
    }
  }
}

}  // namespace flashcore::cuda::sm90
