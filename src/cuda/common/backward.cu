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

__device__ __forceinline__ core::SeqInfo seq_of(const AttentionParams& f, std::int32_t b) {
  return f.is_varlen ? core::seq_info_of(f, b) : core::dense_seq_info(f);
}

struct ExactStats {
  float base, factor;
};

/// Finds base and factor of a row by a warp that reads its keys. Rare, so not fast, and not
/// inlined: the others would have fewer registers.
__device__ __noinline__ ExactStats find_exact_stats(const BackwardParams& p, std::int32_t b,
                                                    std::int32_t h, std::int32_t i) {
  const AttentionParams& f = p.fwd;
  const int lane = threadIdx.x % 32;
  const core::SeqInfo seq = seq_of(f, b);
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
  return {core::softmax_base(state.max), core::output_factor(state.sum)};
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

/// Loads of a warp that are in flight together, of each operand.
constexpr int kLoads = 4;

/// The lanes that share a row, eight columns each: a power of two.
__device__ __forceinline__ int lanes_of_row(std::int32_t columns) {
  return columns > 128 ? 32 : columns > 64 ? 16 : columns > 32 ? 8 : 4;
}
/// The rows that a warp reads together.
__device__ __forceinline__ int rows_of_warp(std::int32_t columns) {
  return kLoads * (32 / lanes_of_row(columns));
}

/// Sums of a row, or a lane's part of them.
struct RowSums {
  float dot;      // Σ x y
  float squares;  // Σ x x, without elements that are not finite
};

__device__ __forceinline__ void add_columns(RowSums& sums, float4 x, float4 y, bool squares) {
  sums.dot = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, sums.dot))));
  if (squares) sums.squares += sum_of_squares(x);
}

/// Eight columns of a row as raw bits, and as numbers of type T.
struct alignas(16) EightColumns {
  Four<std::uint16_t> low, high;
};

__device__ __forceinline__ bool has_eight_columns(const StridedRows& m) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(m.g_data) % 16 == 0;
  return aligned && m.vec4 && m.columns % 8 == 0 && m.row % 8 == 0 && m.first % 8 == 0;
}

__device__ __forceinline__ EightColumns load_eight(const StridedRows& m, std::int64_t row,
                                                   std::int32_t column) {
  const auto* const g_from =
      static_cast<const std::uint16_t*>(m.g_data) + m.first + row * m.row + column;
  const uint4 bits = *reinterpret_cast<const uint4*>(g_from);
  return reinterpret_cast<const EightColumns&>(bits);
}

/// Sums of rows first, first + 1, … (of the last row past the end): lane r < rows_of_warp() gets
/// those of row r.
template <typename T>
__device__ __forceinline__ RowSums sum_vectors(const StridedRows& x, const StridedRows& y,
                                               std::int32_t first, std::int32_t count, int lane,
                                               bool squares) {
  const int lanes = lanes_of_row(x.columns), rows = 32 / lanes;  // of a load
  RowSums parts[kLoads] = {}, own{};
#pragma unroll 1
  for (std::int32_t column = 8 * (lane % lanes); column < x.columns; column += 8 * lanes) {
    EightColumns a[kLoads], b[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::int32_t row = min(first + i * rows + lane / lanes, count - 1);
      a[i] = load_eight(x, row, column), b[i] = load_eight(y, row, column);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      add_columns(parts[i], bits_to_floats<T>(a[i].low), bits_to_floats<T>(b[i].low), squares);
      add_columns(parts[i], bits_to_floats<T>(a[i].high), bits_to_floats<T>(b[i].high), squares);
    }
  }
  __syncwarp();
  const int source = lane % rows * lanes;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      parts[i].dot += __shfl_xor_sync(0xffffffffu, parts[i].dot, offset);
      if (squares) parts[i].squares += __shfl_xor_sync(0xffffffffu, parts[i].squares, offset);
    }
    const float dot = __shfl_sync(0xffffffffu, parts[i].dot, source);
    const float square = squares ? __shfl_sync(0xffffffffu, parts[i].squares, source) : 0.f;
    if (lane / rows == i) own = {dot, square};
  }
  return own;
}

/// The same for any formats and strides, one row at a time. Not inlined, as find_exact_stats().
__device__ __noinline__ RowSums sum_strided(StridedRows x, StridedRows y, std::int32_t first,
                                            std::int32_t count, int lane, bool squares) {
  RowSums own{};
  const int rows = rows_of_warp(x.columns);
#pragma unroll 1
  for (int r = 0; r < rows; ++r) {
    RowSums part{};
    const std::int32_t row = min(first + r, count - 1);
#pragma unroll 1
    for (std::int32_t column = 4 * lane; column < x.columns; column += 128) {
      add_columns(part, load_four_columns(x, row, column), load_four_columns(y, row, column),
                  squares);
    }
    __syncwarp();
    const float dot = warp_sum(part.dot), square = squares ? warp_sum(part.squares) : 0.f;
    if (lane == r) own = {dot, square};
  }
  return own;
}

__device__ __forceinline__ RowSums sum_rows(const StridedRows& x, const StridedRows& y,
                                            std::int32_t first, std::int32_t count, int lane,
                                            bool squares) {
  const bool vectors = has_eight_columns(x) && has_eight_columns(y) && x.element == y.element;
  if (vectors && x.element == core::Element::bf16) {
    return sum_vectors<__nv_bfloat16>(x, y, first, count, lane, squares);
  }
  if (vectors && x.element == core::Element::f16) {
    return sum_vectors<__half>(x, y, first, count, lane, squares);
  }
  return sum_strided(x, y, first, count, lane, squares);
}

/// Calls visit(seq, b, h, first, count) for each group of `rows` rows of every sequence and head:
/// the warp has rows [first, first + rows) of `count`.
template <typename Visit>
__device__ __forceinline__ void for_warp_rows(const BackwardParams& p, std::int32_t heads,
                                              std::int32_t length, int rows, bool queries,
                                              Visit visit) {
  const AttentionParams& f = p.fwd;
  // In 32 bits: a division in 64 bits takes longer than a row.
  const auto row_blocks = static_cast<unsigned>((length + p.stats_rows - 1) / p.stats_rows);
  const unsigned blocks =
      static_cast<unsigned>(f.batch) * static_cast<unsigned>(heads) * row_blocks;
#pragma unroll 1
  for (unsigned block = blockIdx.x; block < blocks; block += gridDim.x) {
    const unsigned head = block / row_blocks;
    const auto b = static_cast<std::int32_t>(head / static_cast<unsigned>(heads));
    const auto h = static_cast<std::int32_t>(head % static_cast<unsigned>(heads));
    const core::SeqInfo seq = seq_of(f, b);
    const std::int32_t count = queries ? seq.q_len : seq.kv_len;
    auto first = static_cast<std::int32_t>(block % row_blocks) * p.stats_rows;
    const std::int32_t end = min(count, first + p.stats_rows);
    if (threadIdx.x == 0 && first == 0 && h == 0 && queries) report(f, seq.error);
    first += static_cast<std::int32_t>(threadIdx.x / 32) * rows;
#pragma unroll 1
    for (; first < end; first += kRowStatsThreads / 32 * rows) visit(seq, b, h, first, count);
  }
}

/// Sums of dout and out.
__device__ __forceinline__ RowSums sum_dout(const BackwardParams& p, const core::SeqInfo& seq,
                                            std::int32_t b, std::int32_t h, std::int32_t first,
                                            int lane) {
  const AttentionParams& f = p.fwd;
  return sum_rows(strided_rows(p.dout, p.dout_element, p.dout_strides, b, h, seq.q_row, f.v_dim),
                  strided_rows(f.out, f.out_element, f.out_strides, b, h, seq.q_row, f.v_dim),
                  first, seq.q_len, lane, p.dout_largest != nullptr);
}

/// Statistics of query first + lane, for lanes with `own`. A row without keys has factor 0.
__device__ __forceinline__ RowStats row_stats_of(const BackwardParams& p, const core::SeqInfo& seq,
                                                 std::int32_t b, std::int32_t h, std::int32_t first,
                                                 bool own, int lane) {
  const AttentionParams& f = p.fwd;
  const RowSums sums = sum_dout(p, seq, b, h, first, lane);
  const std::int32_t i = own ? first + lane : first;
  const std::int64_t q_row = static_cast<std::int64_t>(seq.q_row) + i;
  const float lse = static_cast<const float*>(f.lse)[core::row_offset(f.lse_strides, b, h, q_row)];
  float dlse = 0.f;
  if (p.dlse != nullptr && !f.fault.is(InjectedFault::dlse_ignored)) {
    dlse = static_cast<const float*>(p.dlse)[core::row_offset(p.dlse_strides, b, h, q_row)];
  }
  const RowStats stats{lse, 1.f, sums.dot - dlse};
  const bool no_keys = lse == core::negative_infinity<float>();
  if (no_keys && !f.fault.is(InjectedFault::empty_row_unguarded)) return {0.f, 0.f, 0.f};
  if (p.nonfinite_heads != nullptr && own && !(is_finite(stats.base) && is_finite(stats.delta))) {
    p.nonfinite_heads[b * f.kv_heads + h / p.group] = 1;
  }
  if (p.dout_largest != nullptr && own) {
    raise_norm(p, core::DsNorm::dout, b, h / p.group, sqrtf(sums.squares));
    raise_norm(p, core::DsNorm::delta, b, h / p.group, fabsf(stats.delta));
  }
  return stats;
}

/// Replaces base and factor of the warp's rows whose lse is too large: its rounding would show in
/// P.
__device__ __forceinline__ void replace_inexact(const BackwardParams& p, std::int32_t b,
                                                std::int32_t h, std::int32_t first,
                                                std::int64_t first_at, bool inexact, int lane) {
  for (unsigned rows = __ballot_sync(0xffffffffu, inexact); rows != 0; rows &= rows - 1) {
    const int r = __ffs(static_cast<int>(rows)) - 1;
    const ExactStats exact = find_exact_stats(p, b, h, first + r);
    if (lane != r) continue;
    static_cast<float*>(p.row_base)[first_at + r] = exact.base;
    static_cast<float*>(p.row_factor)[first_at + r] = exact.factor;
  }
}

/// Marks the head if q or dout of a row is not finite, for rows whose statistics do not show it.
__device__ __noinline__ void inspect_rows(const BackwardParams& p, const core::SeqInfo& seq,
                                          std::int32_t b, std::int32_t h, std::int32_t first,
                                          unsigned rows, int lane) {
  const AttentionParams& f = p.fwd;
  const StridedRows operands[] = {
      strided_rows(f.q, f.q_element, f.q_strides, b, h, seq.q_row, f.head_dim),
      strided_rows(p.dout, p.dout_element, p.dout_strides, b, h, seq.q_row, f.v_dim)};
  bool finite = true;
  for (; rows != 0; rows &= rows - 1) {
    const std::int32_t row = first + __ffs(static_cast<int>(rows)) - 1;
    for (const StridedRows& operand : operands) {
      for (std::int32_t d = 4 * lane; d < operand.columns; d += 128) {
        finite &= is_finite(load_four_columns(operand, row, d));
      }
    }
  }
  if (!finite) p.nonfinite_heads[b * f.kv_heads + h / p.group] = 1;
}

__global__ void __launch_bounds__(kRowStatsThreads, 4)
    row_stats_kernel(const __grid_constant__ BackwardParams p) {
  const AttentionParams& f = p.fwd;
  const int lane = threadIdx.x % 32;
  const int warp_rows = rows_of_warp(f.v_dim);
  for_warp_rows(p, f.q_heads, f.q_len, warp_rows, true,
                [&](const core::SeqInfo& seq, std::int32_t b, std::int32_t h, std::int32_t first,
                    std::int32_t count) {
                  const bool own = lane < warp_rows && first + lane < count;
                  const RowStats stats = row_stats_of(p, seq, b, h, first, own, lane);
                  const std::int64_t first_at = core::partial_row(f, b, h, seq.q_row, first);
                  if (own) {
                    static_cast<float*>(p.row_base)[first_at + lane] = stats.base;
                    static_cast<float*>(p.row_factor)[first_at + lane] = stats.factor;
                    static_cast<float*>(p.row_delta)[first_at + lane] = stats.delta;
                  }
                  if (p.k_chunks > 0) {  // a fused kernel does not look at q and dout
                    const bool unseen = own && (stats.factor == 0.f || f.sinks != nullptr);
                    const unsigned rows = __ballot_sync(0xffffffffu, unseen);
                    if (rows != 0) inspect_rows(p, seq, b, h, first, rows, lane);
                  }
                  const bool inexact = stats.base != core::negative_infinity<float>() &&
                                       !(fabsf(stats.base) <= p.largest_exact_lse);
                  replace_inexact(p, b, h, first, first_at, own && p.exact_stats && inexact, lane);
                });
}

/// Norms of the rows of v.
__global__ void __launch_bounds__(kRowStatsThreads)
    v_norms_kernel(const __grid_constant__ BackwardParams p) {
  const AttentionParams& f = p.fwd;
  const int lane = threadIdx.x % 32;
  const int warp_rows = rows_of_warp(f.v_dim);
  for_warp_rows(p, f.kv_heads, f.kv_len, warp_rows, false,
                [&](const core::SeqInfo& seq, std::int32_t b, std::int32_t h, std::int32_t first,
                    std::int32_t count) {
                  const StridedRows v =
                      strided_rows(f.v, f.v_element, f.v_strides, b, h, seq.k_row, f.v_dim);
                  const float norm = sqrtf(sum_rows(v, v, first, count, lane, true).squares);
                  if (lane < warp_rows && first + lane < count)
                    raise_norm(p, core::DsNorm::v, b, h, norm);
                });
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
