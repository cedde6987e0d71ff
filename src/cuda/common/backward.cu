// The small kernels of a call for gradients: statistics of the rows before the main kernel, zeros
// for rows that belong to no sequence, and dsinks.
#include <cuda_runtime.h>

#include "core/ds_unit.h"
#include "core/score.h"
#include "core/seq_info.h"
#include "cuda/primitives/report.cuh"
#include "cuda/primitives/strided_rows.cuh"
#include "cuda/registry.h"

namespace flashcore::cuda {
namespace {

using core::AttentionParams;
using core::BackwardParams;
using core::InjectedFault;

struct RowStats {
  float base, factor, delta;  // core/backward_params.h
};

/// Adds in the same order on every lane.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

/// The score of one pair.
__device__ float score_of(const AttentionParams& f, const core::SeqInfo& seq, const StridedRows& q,
                          const StridedRows& k, std::int32_t b, std::int32_t h, std::int32_t i,
                          std::int32_t key) {
  float sum = 0.f;
#pragma unroll 1
  for (std::int32_t d = 0; d < f.head_dim; d += 4) {
    const float4 x = load_four_columns(q, i, d), y = load_four_columns(k, key, d);
    sum = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, sum))));
  }
  const core::ScoreRow<float> row{f, b, h, i};
  const auto distance = static_cast<float>(i + seq.mask.diagonal - key);
  return core::modify_score<core::ScalarScoreMath, core::ScoreInput::qk>(sum, row, distance, key);
}

/// Finds base and factor of a row by a warp that reads its keys. Rare, so not fast.
__device__ void find_exact_stats(const BackwardParams& p, const core::SeqInfo& seq, std::int32_t b,
                                 std::int32_t h, std::int32_t i, RowStats& stats) {
  const AttentionParams& f = p.fwd;
  const int lane = threadIdx.x % 32;
  const StridedRows q = strided_rows(f.q, f.q_element, f.q_strides, b, h, seq.q_row, f.head_dim);
  const StridedRows k =
      strided_rows(f.k, f.k_element, f.k_strides, b, h / p.group, seq.k_row, f.head_dim);
  const core::KeyRange keys = core::visible_keys(seq.mask, i);
  core::SoftmaxState<float> state{core::negative_infinity<float>(), 0.f};
#pragma unroll 1
  for (std::int32_t key = keys.begin + lane; key < keys.end; key += 32) {
    const float score = score_of(f, seq, q, k, b, h, i, key);
    const float max = fmaxf(state.max, score), base = core::softmax_base(max);
    state.sum = core::add_tile_sum(state.sum, core::exp_scalar(state.max - base),
                                   core::exp_scalar(score - base));
    state.max = max;
  }
  const float max = warp_max(state.max), base = core::softmax_base(max);
  state.sum = warp_sum(state.sum * core::exp_scalar(state.max - base));
  state.max = max;
  if (f.sinks != nullptr) core::add_sink(state, f.sinks[h * f.sinks_stride]);
  stats.base = core::softmax_base(state.max);
  stats.factor = core::output_factor(state.sum);
}

__device__ __forceinline__ float sum_of_squares(float4 x) {
  const float4 y = finite_or_zero(x);
  return fmaf(y.x, y.x, fmaf(y.y, y.y, fmaf(y.z, y.z, y.w * y.w)));
}

/// Raises a norm of (b, kv_head). Bits of positive floats are ordered like their values, so the
/// order of CTAs changes nothing.
__device__ __forceinline__ void raise_norm(const BackwardParams& p, core::DsNorm norm,
                                           std::int32_t b, std::int32_t kv_head, float x) {
  std::uint32_t* const slot = p.dout_largest + core::ds_norm_index(p, norm, b, kv_head);
  const std::uint32_t bits = __float_as_uint(finite_or_zero(x));
  if (*static_cast<volatile std::uint32_t*>(slot) < bits) atomicMax(slot, bits);
}

/// Σ dout · out of a row; `norm` is that of dout, without elements that are not finite.
__device__ float dot_dout_out(const BackwardParams& p, const core::SeqInfo& seq, std::int32_t b,
                              std::int32_t h, std::int32_t i, float& norm) {
  const AttentionParams& f = p.fwd;
  const StridedRows out =
      strided_rows(f.out, f.out_element, f.out_strides, b, h, seq.q_row, f.v_dim);
  const StridedRows dout =
      strided_rows(p.dout, p.dout_element, p.dout_strides, b, h, seq.q_row, f.v_dim);
  float sum = 0.f, squares = 0.f;
  for (std::int32_t c = 4 * (threadIdx.x % 32); c < f.v_dim; c += 128) {
    const float4 x = load_four_columns(dout, i, c), y = load_four_columns(out, i, c);
    sum = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, sum))));
    squares += sum_of_squares(x);
  }
  norm = sqrtf(warp_sum(squares));
  return warp_sum(sum);
}

/// Statistics of query i of (b, h). A row without keys has factor 0.
__device__ RowStats row_stats_of(const BackwardParams& p, const core::SeqInfo& seq, std::int32_t b,
                                 std::int32_t h, std::int32_t i) {
  const AttentionParams& f = p.fwd;
  const std::int64_t q_row = static_cast<std::int64_t>(seq.q_row) + i;
  const float lse = static_cast<const float*>(f.lse)[core::row_offset(f.lse_strides, b, h, q_row)];
  const bool no_keys = lse == core::negative_infinity<float>();
  if (no_keys && !f.fault.is(InjectedFault::empty_row_unguarded)) return {0.f, 0.f, 0.f};
  float norm = 0.f;
  RowStats stats{lse, 1.f, dot_dout_out(p, seq, b, h, i, norm)};
  if (p.dlse != nullptr && !f.fault.is(InjectedFault::dlse_ignored)) {
    stats.delta -= static_cast<const float*>(p.dlse)[core::row_offset(p.dlse_strides, b, h, q_row)];
  }
  if (!no_keys && !(fabsf(lse) <= p.largest_exact_lse)) {
    find_exact_stats(p, seq, b, h, i, stats);
  }
  if (p.dout_largest != nullptr && threadIdx.x % 32 == 0) {
    raise_norm(p, core::DsNorm::dout, b, h / p.group, norm);
    raise_norm(p, core::DsNorm::delta, b, h / p.group, fabsf(stats.delta));
  }
  return stats;
}

/// One warp per row.
__global__ void __launch_bounds__(kRowStatsThreads)
    row_stats_kernel(const __grid_constant__ BackwardParams p) {
  const AttentionParams& f = p.fwd;
  const std::int64_t rows = static_cast<std::int64_t>(f.batch) * f.q_heads * f.q_len;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (kRowStatsThreads / 32);
  const int lane = threadIdx.x % 32;
  for (std::int64_t row =
           blockIdx.x * static_cast<std::int64_t>(kRowStatsThreads / 32) + threadIdx.x / 32;
       row < rows; row += warps) {
    const auto i = static_cast<std::int32_t>(row % f.q_len);
    const std::int64_t head = row / f.q_len;
    const auto h = static_cast<std::int32_t>(head % f.q_heads);
    const auto b = static_cast<std::int32_t>(head / f.q_heads);
    const core::SeqInfo seq = f.is_varlen ? core::seq_info_of(f, b) : core::dense_seq_info(f);
    if (lane == 0 && i == 0 && h == 0) report(f, seq.error);
    if (i >= seq.q_len) continue;
    const RowStats stats = row_stats_of(p, seq, b, h, i);
    if (lane != 0) continue;
    const std::int64_t at = core::partial_row(f, b, h, seq.q_row, i);
    static_cast<float*>(p.row_base)[at] = stats.base;
    static_cast<float*>(p.row_factor)[at] = stats.factor;
    static_cast<float*>(p.row_delta)[at] = stats.delta;
  }
}

/// One warp per key and KV head.
__global__ void __launch_bounds__(kRowStatsThreads)
    v_norms_kernel(const __grid_constant__ BackwardParams p) {
  const AttentionParams& f = p.fwd;
  const std::int64_t rows = static_cast<std::int64_t>(f.batch) * f.kv_heads * f.kv_len;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (kRowStatsThreads / 32);
  for (std::int64_t row =
           blockIdx.x * static_cast<std::int64_t>(kRowStatsThreads / 32) + threadIdx.x / 32;
       row < rows; row += warps) {
    const auto key = static_cast<std::int32_t>(row % f.kv_len);
    const std::int64_t head = row / f.kv_len;
    const auto h = static_cast<std::int32_t>(head % f.kv_heads);
    const auto b = static_cast<std::int32_t>(head / f.kv_heads);
    const core::SeqInfo seq = f.is_varlen ? core::seq_info_of(f, b) : core::dense_seq_info(f);
    if (key >= seq.kv_len) continue;
    const StridedRows v = strided_rows(f.v, f.v_element, f.v_strides, b, h, seq.k_row, f.v_dim);
    float squares = 0.f;
    for (std::int32_t c = 4 * (threadIdx.x % 32); c < f.v_dim; c += 128) {
      squares += sum_of_squares(load_four_columns(v, key, c));
    }
    const float norm = sqrtf(warp_sum(squares));
    if (threadIdx.x % 32 == 0) raise_norm(p, core::DsNorm::v, b, h, norm);
  }
}

/// Zeroes all rows of a varlen gradient.
__device__ void zero_rows(void* g_data, core::Element element, const core::Strides& strides,
                          std::int32_t rows, std::int32_t heads, std::int32_t columns) {
  if (g_data == nullptr) return;
  const std::int64_t count = static_cast<std::int64_t>(rows) * heads * columns;
  const float zeros[4] = {};
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kZeroRowsThreads) + threadIdx.x;
       i < count; i += static_cast<std::int64_t>(gridDim.x) * kZeroRowsThreads) {
    const std::int64_t column = i % columns, row = i / columns;
    const std::int64_t at = core::row_offset(strides, 0, row % heads, row / heads);
    store_columns(g_data, element, at + column * strides.column, 0, 0, 1, zeros, false);
  }
}

__global__ void __launch_bounds__(kZeroRowsThreads)
    zero_rows_kernel(const __grid_constant__ BackwardParams p) {
  const AttentionParams& f = p.fwd;
  if (f.cu_seqlens_q != nullptr) {
    zero_rows(p.dq, p.dq_element, p.dq_strides, f.total_q, f.q_heads, f.head_dim);
  }
  if (f.cu_seqlens_k != nullptr) {
    zero_rows(p.dk, p.dk_element, p.dk_strides, f.total_k, f.kv_heads, f.head_dim);
    zero_rows(p.dv, p.dv_element, p.dv_strides, f.total_k, f.kv_heads, f.v_dim);
  }
}

/// One CTA per query head. Thread t adds rows t, t + kDsinksThreads, ... of all sequences, then a
/// tree adds the threads.
__global__ void __launch_bounds__(kDsinksThreads)
    dsinks_kernel(const __grid_constant__ BackwardParams p) {
  __shared__ float s_sum[kDsinksThreads];
  const AttentionParams& f = p.fwd;
  const auto h = static_cast<std::int32_t>(blockIdx.x);
  float sum = 0.f;
  if (f.sinks != nullptr) {  // a partial result has none
    const float sink = f.sinks[h * f.sinks_stride];
    for (std::int32_t b = 0; b < f.batch; ++b) {
      const core::SeqInfo seq = core::seq_info_of(f, b);
      for (std::int32_t i = threadIdx.x; i < seq.q_len; i += kDsinksThreads) {
        const std::int64_t at = core::partial_row(f, b, h, seq.q_row, i);
        const float factor = static_cast<const float*>(p.row_factor)[at];
        if (factor == 0.f) continue;
        const float prob =
            core::exp_scalar(sink - static_cast<const float*>(p.row_base)[at]) * factor;
        if (prob != 0.f) sum += prob * static_cast<const float*>(p.row_delta)[at];
      }
    }
  }
  s_sum[threadIdx.x] = sum;
  for (int half = kDsinksThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) s_sum[threadIdx.x] += s_sum[threadIdx.x + half];
  }
  if (threadIdx.x != 0) return;
  const bool wrong = f.fault.is(InjectedFault::dsinks_sign_wrong);
  p.dsinks[h * p.dsinks_stride] = wrong ? s_sum[0] : -s_sum[0];
}

}  // namespace

const void* row_stats_entry() noexcept { return reinterpret_cast<const void*>(&row_stats_kernel); }
const void* v_norms_entry() noexcept { return reinterpret_cast<const void*>(&v_norms_kernel); }
const void* zero_rows_entry() noexcept { return reinterpret_cast<const void*>(&zero_rows_kernel); }
const void* dsinks_entry() noexcept { return reinterpret_cast<const void*>(&dsinks_kernel); }

}  // namespace flashcore::cuda
