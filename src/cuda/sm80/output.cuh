// Rows of the output: final softmax, addresses and stores, and the staging of O in shared memory.
#pragma once

#include "core/assert.h"
#include "core/row_offset.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm80/config.cuh"

namespace flashcore::cuda::sm80 {

/// Offset of a query's row in the caller's output or LSE, in elements.
__device__ __forceinline__ std::int64_t query_offset(const core::Strides& strides,
                                                     const WorkTile& work, const Row& row) {
  return core::row_offset(strides, work.b, row.head,
                          static_cast<std::int64_t>(work.seq.q_row) + row.query);
}

__device__ __forceinline__ std::int64_t output_offset(const AttentionParams& p,
                                                      const WorkTile& work, const Row& row) {
  return query_offset(p.out_strides, work, row);
}

/// Row index of a split's partial result in the workspace.
__device__ __forceinline__ std::int64_t partial_of(const AttentionParams& p, const WorkTile& work,
                                                   const Row& row, std::int32_t split) {
  return split * core::partial_rows(p) +
         core::partial_row(p, work.b, row.head, work.seq.q_row, row.query);
}

/// use(g_out) with the caller's output as a pointer of its type.
template <typename C, typename Use>
__device__ __forceinline__ void with_output(const AttentionParams& p, Use use) {
  if (p.out_element == core::Element::f32) {
    use(static_cast<float*>(p.out));
  } else {
    with_element<C>(p.out_element, [&](auto zero) { use(static_cast<decltype(zero)*>(p.out)); });
  }
}

/// Stores four columns of the caller's output in the row that begins at `offset`.
template <typename C, bool kFastPath>
__device__ __forceinline__ void store_output_columns(const AttentionParams& p, std::int64_t offset,
                                                     int column, const float (&x)[4]) {
  with_output<C>(p, [&](auto* g_out) {
    store_columns(g_out + offset, p.out_strides.column, column, p.v_dim, x,
                  kFastPath || p.vector_rows);
  });
}

__device__ __forceinline__ void store_lse(const AttentionParams& p, const WorkTile& work,
                                          const Row& row, float lse) {
  static_cast<float*>(p.lse)[query_offset(p.lse_strides, work, row)] = lse;
}

__device__ __forceinline__ bool fault_skips_row(const AttentionParams& p, const WorkTile& work,
                                                const Row& row) {
  return p.fault.is(InjectedFault::row_not_written) && row.query == work.seq.q_len - 1;
}

using FinalRow = core::FinalRow<float>;

/// A row after its last key. The sink is added here, unless a later combine of splits adds it.
__device__ __forceinline__ FinalRow finalize_row(const AttentionParams& p, const Row& row,
                                                 const core::SoftmaxState<float>& state) {
  const bool adds_sink =
      p.splits == 1 || p.cluster_combine || p.fault.is(InjectedFault::sink_in_every_split);
  return core::finalize_row<FastMath>(state, core::sink_of(p, row.head, adds_sink), p.fault);
}

/// The same, and normalises columns of the row, accumulated over all keys of `state`.
template <int kColumns>
__device__ __forceinline__ FinalRow finalize_row(const AttentionParams& p, const Row& row,
                                                 const core::SoftmaxState<float>& state,
                                                 float (&x)[kColumns]) {
  const FinalRow final = finalize_row(p, row, state);
#pragma unroll
  for (float& column : x) column = core::output_of_keys(column, state.sum) * final.factor;
  return final;
}

/// Does nothing outside of assertion builds.
template <int kColumns>
__device__ __forceinline__ void assert_row(const AttentionParams& p, const WorkTile& work,
                                           const Row& row, const FinalRow& final,
                                           const float (&x)[kColumns]) {
  core::assert_row_state(p, work.seq, work.b, row.head, row.query, final.state, final.lse(p.fault));
  for (const float out : x) {
    core::assert_output(p, work.seq, work.b, row.head, row.query, out);
  }
}

/// Factor from the accumulated O to the sum of P V.
template <typename C>
__device__ __forceinline__ float output_scale(const Kv8Scales<C>& scales) {
  if constexpr (C::kKv8) {
    return scales.output_scale;
  } else {
    return 1.f;
  }
}

/// 8-bit V: a thread's four adjacent columns of a row, in n-tiles n and n + 1, from column
/// 8 n + 4 (lane % 4) on. The tiles are in the order of even_odd_index().
template <typename C>
__device__ __forceinline__ float4 adjacent_columns(const AccO<C>& acc_o, int m, int n, int half) {
  return make_float4(acc_o[m][n][2 * half], acc_o[m][n + 1][2 * half], acc_o[m][n][2 * half + 1],
                     acc_o[m][n + 1][2 * half + 1]);
}

/// Stages O and row statistics of the warps where Q, K and V were, for all threads of the CTA.
template <typename C>
__device__ __forceinline__ void stage_output(SharedStorage<C>& s, const AccO<C>& acc_o,
                                             const RowStats<C>& row_stats, const Thread<C>& t) {
  const int rows = s.work.rows;
  core::SoftmaxState<float> state[C::kRowTiles][2];
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state[m][half] = {row_stats.of[m][half].max * s.work.unit,
                        row_reduce_sum<C>(row_stats.of[m][half].sum)};
    }
  }
  __syncthreads();  // no thread reads Q, K or V any more
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = t.row(m, half);
      if (r >= rows) continue;
      if (t.is_row_leader()) s.staged.row_stats[t.warp_n][r] = state[m][half];
      float(&s_row)[C::kHeadDim + 8] = s.staged.acc_o[t.warp_n][r];
      if constexpr (C::kKv8) {
        const float scale = output_scale<C>(s);
#pragma unroll
        for (int n = 0; n < C::kColumnTiles; n += 2) {
          const float4 x = adjacent_columns<C>(acc_o, m, n, half);
          *reinterpret_cast<float4*>(&s_row[8 * n + 4 * (t.lane % 4)]) =
              make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
        }
      } else if constexpr (C::kSwapAB) {
#pragma unroll
        for (int n = 0; n < C::kColumnTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int reg = C::reg_of(half, i);
            s_row[t.column(n, reg)] = acc_o[m][n][reg];
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < C::kColumnTiles; ++n) {
          *reinterpret_cast<float2*>(&s_row[t.column(n, 2 * half)]) =
              make_float2(acc_o[m][n][2 * half], acc_o[m][n][2 * half + 1]);
        }
      }
    }
  }
  __syncthreads();
}

/// Four columns of a row, reduced over the warps that share its keys; returns its statistics.
template <typename C>
__device__ __forceinline__ core::SoftmaxState<float> reduce_key_warps(const StagedOutput<C>& s,
                                                                      int r, int column,
                                                                      float (&x)[4]) {
  float max[C::kWarpsN];
#pragma unroll
  for (int w = 0; w < C::kWarpsN; ++w) max[w] = s.row_stats[w][r].max;
  core::SoftmaxState<float> all{largest(max), 0.f};
#pragma unroll
  for (int w = 0; w < C::kWarpsN; ++w) {
    const float weight = C::kWarpsN == 1 ? 1.f : core::partial_weight<FastMath>(max[w], all.max);
    const float4 acc_o = *reinterpret_cast<const float4*>(&s.acc_o[w][r][column]);
    all.sum = fmaf(s.row_stats[w][r].sum, weight, all.sum);
    x[0] = fmaf(acc_o.x, weight, x[0]);
    x[1] = fmaf(acc_o.y, weight, x[1]);
    x[2] = fmaf(acc_o.z, weight, x[2]);
    x[3] = fmaf(acc_o.w, weight, x[3]);
  }
  return all;
}

}  // namespace flashcore::cuda::sm80
