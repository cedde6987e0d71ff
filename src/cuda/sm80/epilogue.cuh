// Output and LSE of a block: to the caller, or to the workspace where keys are split.
#pragma once

#include "core/assert.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm80/config.cuh"

namespace flashcore::cuda::sm80 {

/// Where a row of the caller's output begins, in elements.
__device__ __forceinline__ std::int64_t output_offset(const AttentionParams& p,
                                                      const WorkTile& item, const Row& row) {
  const std::int64_t q_row = static_cast<std::int64_t>(item.seq.q_row) + row.query;
  return item.b * p.out_strides.batch + row.head * p.out_strides.head + q_row * p.out_strides.row;
}

/// use(the caller's output), a pointer of its type.
template <typename C, bool kFastPath, typename Use>
__device__ __forceinline__ void with_output(const AttentionParams& p, Use use) {
  if (!kFastPath && p.out_element == core::Element::f32) {
    use(static_cast<float*>(p.out));
  } else {
    with_element<C>(p.out_element, [&](auto zero) { use(static_cast<decltype(zero)*>(p.out)); });
  }
}

/// Four columns of the caller's output, in the row that begins at `offset`.
template <typename C, bool kFastPath>
__device__ __forceinline__ void store_output_columns(const AttentionParams& p, std::int64_t offset,
                                                     int column, const float (&x)[4]) {
  with_output<C, kFastPath>(p, [&](auto* g_out) {
    store_columns(g_out + offset, p.out_strides.column, column, p.v_dim, x,
                  kFastPath || p.vector_rows);
  });
}

__device__ __forceinline__ void store_lse(const AttentionParams& p, const WorkTile& item,
                                          const Row& row, float lse) {
  const std::int64_t q_row = static_cast<std::int64_t>(item.seq.q_row) + row.query;
  static_cast<float*>(p.lse)[item.b * p.lse_strides.batch + row.head * p.lse_strides.head +
                             q_row * p.lse_strides.row] = lse;
}

/// Where this block's partial result of a row lies, in rows.
__device__ __forceinline__ std::int64_t partial_of(const AttentionParams& p, const WorkTile& item,
                                                   const Row& row, std::int32_t split) {
  return split * core::partial_rows(p) +
         core::partial_row(p, item.b, row.head, item.seq.q_row, row.query);
}

/// Whether a row stays as it was, on purpose.
__device__ __forceinline__ bool fault_skips_row(const AttentionParams& p, const WorkTile& item,
                                                const Row& row) {
  return p.fault.is(InjectedFault::row_not_written) && row.query == item.seq.q_len - 1;
}

/// The end of a row's softmax: the factor of its accumulated output. The sink joins where no merge
/// follows that adds it.
__device__ __forceinline__ float finalize_stats(const AttentionParams& p, const Row& row,
                                                core::SoftmaxState<float>& state) {
  float factor = 1.f;
  if (p.sinks != nullptr &&
      (p.splits == 1 || p.cluster_combine || p.fault.is(InjectedFault::sink_in_every_split))) {
    factor = core::add_sink(state, p.sinks[row.head * p.sinks_stride]);
  }
  return factor * (p.fault.is(InjectedFault::empty_row_is_nan) ? 1.f / state.sum
                                                               : fast_output_factor(state.sum));
}

/// Columns of a row, accumulated over all keys of `state`, become its output.
template <int kColumns>
__device__ __forceinline__ void finalize_row(const AttentionParams& p, const Row& row,
                                             core::SoftmaxState<float>& state,
                                             float (&x)[kColumns]) {
  const float sum = state.sum;
  const float factor = finalize_stats(p, row, state);
#pragma unroll
  for (float& column : x) column = core::output_of_keys(column, sum) * factor;
}

__device__ __forceinline__ float lse_of(const AttentionParams& p,
                                        const core::SoftmaxState<float>& state) {
  const float lse = core::log_sum_exp(state);
  return p.fault.is(InjectedFault::lse_in_base_2) ? lse * static_cast<float>(core::kLog2E) : lse;
}

/// Nothing, but in an assertion build.
template <int kColumns>
__device__ __forceinline__ void assert_row(const AttentionParams& p, const WorkTile& item,
                                           const Row& row, const core::SoftmaxState<float>& state,
                                           const float (&x)[kColumns]) {
  core::assert_row_state(p, item.seq, item.b, row.head, row.query, state, lse_of(p, state));
  for (const float out : x) {
    core::assert_output(p, item.seq, item.b, row.head, row.query, out);
  }
}

/// What the accumulated output is multiplied by to be the sum of P V.
template <typename C>
__device__ __forceinline__ float output_scale(const Kv8Scales<C>& scales) {
  if constexpr (C::kKv8) {
    return scales.of_output;
  } else {
    return 1.f;
  }
}

/// Four neighbouring columns of a row that a thread has in n-tiles n and n + 1 of 8-bit V: those
/// tiles are in the order of even_odd_index(), from column 8 n + 4 (lane % 4) on.
template <typename C>
__device__ __forceinline__ float4 four_columns(const AccO<C>& acc_o, int m, int n, int half) {
  return make_float4(acc_o[m][n][2 * half], acc_o[m][n + 1][2 * half], acc_o[m][n][2 * half + 1],
                     acc_o[m][n + 1][2 * half + 1]);
}

/// Straight from the accumulators, for whole 16-bit rows. Neighbouring lanes exchange columns, so
/// that each has four in a row and a quad writes all of a 32-byte sector.
template <typename C, bool kFastPath>
__device__ __forceinline__ void store_accumulators(AccO<C>& acc_o, const RowStats<C>& states,
                                                   const Kv8Scales<C>& scales,
                                                   const AttentionParams& p, const WorkTile& item,
                                                   const Thread<C>& t) {
  const bool odd = t.lane % 2 != 0;
  const auto packed = [&](float low, float high) {
    std::uint32_t pair;
    with_element<C>(p.out_element, [&](auto zero) { pair = pack<decltype(zero)>(low, high); });
    return pair;
  };
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = t.row(m, half);
      const Row row = row_of(p, item, min(r, item.rows - 1));
      core::SoftmaxState<float> state{states.of[m][half].max * item.unit,
                                      quad_sum(states.of[m][half].sum)};
      if (__any_sync(0xffffffffu, state.sum == 0.f)) {  // rarely, and one branch for the warp
#pragma unroll
        for (int n = 0; n < C::kColumnTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& x = acc_o[m][n][2 * half + i];
            x = core::output_of_keys(x, state.sum);
          }
        }
      }
      const float factor = finalize_stats(p, row, state) * output_scale<C>(scales);
      const bool written = r < item.rows && !fault_skips_row(p, item, row);
      if (written && p.lse != nullptr && t.lane % 4 == 0) {
        store_lse(p, item, row, lse_of(p, state));
      }
      // Lane 0 of a quad has columns 0-3 of the first n-tile of two, lane 2 its columns 4-7; lanes
      // 1 and 3 those of the second.
      auto* g_row = static_cast<std::uint16_t*>(p.out) + output_offset(p, item, row);
      const int column = 8 * (t.lane % 2) + 4 * (t.lane % 4 / 2);
#pragma unroll
      for (int n = 0; n < C::kColumnTiles; n += 2) {
        if (written) {
          assert_row(p, item, row, state,
                     {acc_o[m][n][2 * half] * factor, acc_o[m][n][2 * half + 1] * factor,
                      acc_o[m][n + 1][2 * half] * factor, acc_o[m][n + 1][2 * half + 1] * factor});
        }
        if constexpr (C::kKv8) {
          const int first = 8 * n + 4 * (t.lane % 4);
          const float4 four = four_columns<C>(acc_o, m, n, half);
          if (written && (kFastPath || first < p.v_dim)) {
            *reinterpret_cast<uint2*>(g_row + first) = make_uint2(
                packed(four.x * factor, four.y * factor), packed(four.z * factor, four.w * factor));
          }
        } else {
          std::uint32_t x[2];  // of the two n-tiles
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            x[i] =
                packed(acc_o[m][n + i][2 * half] * factor, acc_o[m][n + i][2 * half + 1] * factor);
          }
          const std::uint32_t theirs = __shfl_xor_sync(0xffffffffu, odd ? x[0] : x[1], 1);
          if (written && (kFastPath || 8 * n + column < p.v_dim)) {
            *reinterpret_cast<uint2*>(g_row + 8 * n + column) =
                odd ? make_uint2(theirs, x[1]) : make_uint2(x[0], theirs);
          }
        }
      }
    }
  }
}

/// The warps leave their results where Q, K and V were, for all threads of the block to read.
template <typename C>
__device__ __forceinline__ void stage_output(SharedStorage<C>& storage, const AccO<C>& acc_o,
                                             const RowStats<C>& states, const Thread<C>& t) {
  const int rows = storage.item.rows;
  core::SoftmaxState<float> state[C::kRowTiles][2];
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state[m][half] = {states.of[m][half].max * storage.item.unit,
                        row_reduce_sum<C>(states.of[m][half].sum)};
    }
  }
  __syncthreads();  // Q, K and V are read
  Results<C>& s = storage.results;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = t.row(m, half);
      if (r >= rows) continue;
      if (t.is_row_leader()) s.state[t.warp_n][r] = state[m][half];
      if constexpr (C::kKv8) {
        const float scale = output_scale<C>(storage);
#pragma unroll
        for (int n = 0; n < C::kColumnTiles; n += 2) {
          const float4 x = four_columns<C>(acc_o, m, n, half);
          *reinterpret_cast<float4*>(&s.acc_o[t.warp_n][r][8 * n + 4 * (t.lane % 4)]) =
              make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
        }
      } else if constexpr (C::kSwapAB) {
#pragma unroll
        for (int n = 0; n < C::kColumnTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int reg = C::reg_of(half, i);
            s.acc_o[t.warp_n][r][t.column(n, reg)] = acc_o[m][n][reg];
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < C::kColumnTiles; ++n) {
          *reinterpret_cast<float2*>(&s.acc_o[t.warp_n][r][t.column(n, 2 * half)]) =
              make_float2(acc_o[m][n][2 * half], acc_o[m][n][2 * half + 1]);
        }
      }
    }
  }
  __syncthreads();
}

/// Four columns of a row, joined over the key warps, and the row's softmax state.
template <typename C>
__device__ __forceinline__ core::SoftmaxState<float> reduce_key_warps(const Results<C>& s, int r,
                                                                      int column, float (&x)[4]) {
  float max[C::kWarpsN];
#pragma unroll
  for (int w = 0; w < C::kWarpsN; ++w) max[w] = s.state[w][r].max;
  core::SoftmaxState<float> all{largest(max), 0.f};
  const float base = core::softmax_base(all.max);
#pragma unroll
  for (int w = 0; w < C::kWarpsN; ++w) {
    const float weight = C::kWarpsN == 1 ? 1.f : fast_exp(max[w] - base);
    const float4 acc_o = *reinterpret_cast<const float4*>(&s.acc_o[w][r][column]);
    all.sum = fmaf(s.state[w][r].sum, weight, all.sum);
    x[0] = fmaf(acc_o.x, weight, x[0]);
    x[1] = fmaf(acc_o.y, weight, x[1]);
    x[2] = fmaf(acc_o.z, weight, x[2]);
    x[3] = fmaf(acc_o.w, weight, x[3]);
  }
  return all;
}

/// Joins the key warps' results and writes four columns at a time.
template <typename C, bool kFastPath>
__device__ __forceinline__ void store_output(const Results<C>& s, const AttentionParams& p,
                                             const WorkTile& item) {
  constexpr int kFours = C::kHeadDim / 4;
#pragma unroll 1
  for (int index = threadIdx.x; index < item.rows * kFours; index += C::kThreads) {
    const int r = index / kFours, column = 4 * (index % kFours);
    const Row row = row_of(p, item, r);
    if (fault_skips_row(p, item, row)) continue;
    float x[4] = {};
    core::SoftmaxState<float> state = reduce_key_warps<C>(s, r, column, x);
    finalize_row(p, row, state, x);
    assert_row(p, item, row, state, x);
    if (p.splits > 1) {
      const std::int64_t partial = partial_of(p, item, row, item.split);
      if (column == 0) static_cast<float*>(p.partial_lse)[partial] = lse_of(p, state);
      if (kFastPath || column < p.v_dim) {
        store_columns(static_cast<float*>(p.partial_out) + partial * p.v_dim, 1, column, p.v_dim, x,
                      kFastPath || p.v_dim % 4 == 0);
      }
    } else {
      if (column == 0 && p.lse != nullptr) store_lse(p, item, row, lse_of(p, state));
      if (kFastPath || column < p.v_dim)
        store_output_columns<C, kFastPath>(p, output_offset(p, item, row), column, x);
    }
  }
}

}  // namespace flashcore::cuda::sm80
