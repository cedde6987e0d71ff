// Gradients of attention on CUDA cores, for any GPU from sm_75. The readable baseline: every
// option, every layout, f32 arithmetic, formats selected at run time. core/backward_tiles.h lists
// the work tiles; common/backward.cu computes the statistics of the rows before.
//
// A CTA has the rows of operand A, and steps through those of operand B, kTileB at a time:
//
//            A1   A2   B1   B2   S = A1 B1ᵀ, dP = A2 B2ᵀ, then
//   dkdv     K    V    Q    dO   dK += dZ B1, dV += P B2 (S, P, dZ have keys as rows)
//   dq       Q    dO   K    V    dQ += dZ B1
//   dbias    Q    dO   K    V    dbias += dS
//
//   code     the same for all outputs: compute_tile(), whose operands are known at run time
//   CTA      256 threads = 16 rows (ty) x 16 columns (tx). A thread owns rows ty + 16 r of A. Per
//            row it has the pairs with rows tx + 16 c of B and four columns of a gradient per chunk
//   chunks   all operands pass through shared memory 64 columns at a time, as f32
//   NaN      P and dS of a hidden pair are selected to 0. A product with P or dZ takes 0 in place
//            of an operand that is not finite: a pair with weight 0 contributes nothing
//   order    every sum has a fixed order
#pragma once

#include <cuda_runtime.h>

#include "core/backward_tiles.h"
#include "core/score.h"
#include "core/seq_info.h"
#include "cuda/primitives/report.cuh"
#include "cuda/primitives/strided_rows.cuh"

namespace flashcore::cuda::simt {

using core::BackwardOutput;
using core::BackwardParams;
using core::InjectedFault;
using core::KeyRange;

template <int kHeadDim_, int kTileQ_, int kTileK_, int kStages_, int kWarpRows_, int kThreads_>
struct BwdConfig {
  static constexpr int kHeadDim = kHeadDim_;  // head_dim and v_dim at most
  static constexpr int kTileA = kTileQ_;
  static constexpr int kTileB = core::kDbiasKeys;
  static constexpr int kThreads = kThreads_;
  static constexpr int kRows = kTileA / 16;  // per thread
  static constexpr int kCols = kTileB / 16;  // per thread
  static constexpr int kChunk = 64;
  static constexpr int kChunks = kHeadDim / kChunk;
  static constexpr int kPad = 4;
  static_assert(kTileQ_ == kTileK_ && kTileA % 16 == 0 && kHeadDim % kChunk == 0);
  static_assert(kStages_ == 1 && kWarpRows_ == 0 && kThreads == 256);
};

/// The rows of A that the CTA processes. One thread writes it, all read it.
struct alignas(16) BwdWork {
  core::SeqInfo seq;
  core::BackwardTile tile;
  std::int32_t b, h, kv_head;  // of the present step
  std::int32_t first_a, rows_a;
};

template <typename C>
struct alignas(16) BwdStorage {
  BwdWork work;
  float a[C::kTileA][C::kChunk + C::kPad];
  float b[C::kTileB][C::kChunk + C::kPad];
  float p[C::kTileA][C::kTileB + C::kPad];   // S, then P
  float ds[C::kTileA][C::kTileB + C::kPad];  // dP, then dS or dZ
  // Statistics of the query rows. These are rows of A or of B.
  static constexpr int kMaxRows = C::kTileA > C::kTileB ? C::kTileA : C::kTileB;
  float base[kMaxRows], factor[kMaxRows], delta[kMaxRows];
  float poison[kMaxRows];  // NaN if a row of dout is not finite, else 0
  KeyRange range[kMaxRows];
};

// ---------------------------------------------------------------------------------------------
// Loading

/// s_tile[r][c] = m[first + r][column + c] for r < kRows, c < 64; 0 from row `rows` on.
template <int kRows, int kStride>
__device__ __forceinline__ void load_chunk(float (*s_tile)[kStride], const StridedRows& m,
                                           std::int32_t first, int rows, int column) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  float4 x[kRows / 16];
#pragma unroll
  for (int n = 0; n < kRows / 16; ++n) {
    x[n] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (ty + 16 * n < rows) x[n] = load_four_columns(m, first + ty + 16 * n, column + 4 * tx);
  }
#pragma unroll
  for (int n = 0; n < kRows / 16; ++n) {
    *reinterpret_cast<float4*>(&s_tile[ty + 16 * n][4 * tx]) = x[n];
  }
}

/// Replaces numbers of this thread's part of a chunk that are not finite by 0.
template <int kRows, int kStride>
__device__ __forceinline__ void clean_chunk(float (*s_tile)[kStride]) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
  for (int n = 0; n < kRows / 16; ++n) {
    float4& x = *reinterpret_cast<float4*>(&s_tile[ty + 16 * n][4 * tx]);
    if (!is_finite(x)) x = finite_or_zero(x);
  }
}

/// Marks the rows whose part in a chunk is not finite.
template <int kRows, int kStride>
__device__ __forceinline__ void mark_poison(float* s_poison, const float (*s_tile)[kStride]) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
  for (int n = 0; n < kRows / 16; ++n) {
    const float4 x = *reinterpret_cast<const float4*>(&s_tile[ty + 16 * n][4 * tx]);
    if (!is_finite(x)) s_poison[ty + 16 * n] = __int_as_float(0x7fffffff);
  }
}

/// Loads statistics and visible keys of query rows [first, first + rows).
template <typename C>
__device__ __forceinline__ void load_stats(BwdStorage<C>& s, const BackwardParams& p,
                                           std::int32_t first, int rows) {
  const core::AttentionParams& f = p.fwd;
  const BwdWork& work = s.work;
  for (int r = threadIdx.x; r < BwdStorage<C>::kMaxRows; r += C::kThreads) {
    s.poison[r] = 0.f;
    s.base[r] = s.factor[r] = s.delta[r] = 0.f;
    s.range[r] = {0, 0};
    if (r >= rows) continue;
    const std::int64_t at = core::partial_row(f, work.b, work.h, work.seq.q_row, first + r);
    const bool next = f.fault.is(InjectedFault::delta_of_next_row) && r + 1 < rows;
    s.base[r] = static_cast<const float*>(p.row_base)[at];
    s.factor[r] = static_cast<const float*>(p.row_factor)[at];
    s.delta[r] = static_cast<const float*>(p.row_delta)[at + (next ? 1 : 0)];
    if (f.fault.is(InjectedFault::delta_ignored)) s.delta[r] = 0.f;
    s.range[r] = core::visible_keys(work.seq.mask, first + r);
  }
}

// ---------------------------------------------------------------------------------------------
// Operands

enum class BwdOperand { q, k, v, dout };

/// The operands of product `product`: 0 gives S, 1 gives dP.
__device__ __forceinline__ BwdOperand operand_a(bool a_is_keys, int product) {
  if (product == 0) return a_is_keys ? BwdOperand::k : BwdOperand::q;
  return a_is_keys ? BwdOperand::v : BwdOperand::dout;
}
__device__ __forceinline__ BwdOperand operand_b(bool a_is_keys, int product) {
  return operand_a(!a_is_keys, product);
}

/// Known at run time: the code that multiplies them is compiled once.
__device__ __forceinline__ StridedRows rows_of_operand(const BackwardParams& p, const BwdWork& work,
                                                       BwdOperand operand) {
  const core::AttentionParams& f = p.fwd;
  switch (operand) {
    case BwdOperand::q:
      return strided_rows(f.q, f.q_element, f.q_strides, work.b, work.h, work.seq.q_row,
                          f.head_dim);
    case BwdOperand::k:
      return strided_rows(f.k, f.k_element, f.k_strides, work.b, work.kv_head, work.seq.k_row,
                          f.head_dim);
    case BwdOperand::v:
      return strided_rows(f.v, f.v_element, f.v_strides, work.b, work.kv_head, work.seq.k_row,
                          f.v_dim);
    case BwdOperand::dout: break;
  }
  return strided_rows(p.dout, p.dout_element, p.dout_strides, work.b, work.h, work.seq.q_row,
                      f.v_dim);
}

// ---------------------------------------------------------------------------------------------
// Pairs

/// x[r][c] += A[row r] · B[row c] over one chunk of columns.
template <typename C>
__device__ __forceinline__ void multiply_chunk(float (&x)[C::kRows][C::kCols],
                                               const BwdStorage<C>& s) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll 4
  for (int d = 0; d < C::kChunk; d += 4) {
    float4 a[C::kRows], b[C::kCols];
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      a[r] = *reinterpret_cast<const float4*>(&s.a[ty + 16 * r][d]);
    }
#pragma unroll
    for (int c = 0; c < C::kCols; ++c) {
      b[c] = *reinterpret_cast<const float4*>(&s.b[tx + 16 * c][d]);
    }
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < C::kCols; ++c) {
        x[r][c] = fmaf(a[r].x, b[c].x, x[r][c]);
        x[r][c] = fmaf(a[r].y, b[c].y, x[r][c]);
        x[r][c] = fmaf(a[r].z, b[c].z, x[r][c]);
        x[r][c] = fmaf(a[r].w, b[c].w, x[r][c]);
      }
    }
  }
}

/// S = A1 B1ᵀ and dP = A2 B2ᵀ of a step. Marks rows of dO that are not finite if they are B's.
template <typename C>
__device__ __forceinline__ void multiply(BwdStorage<C>& s, const BackwardParams& p, bool a_is_keys,
                                         std::int32_t first_b, int rows_b) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll 1  // one copy of the code
  for (int product = 0; product < 2; ++product) {
    const StridedRows a = rows_of_operand(p, s.work, operand_a(a_is_keys, product));
    const StridedRows b = rows_of_operand(p, s.work, operand_b(a_is_keys, product));
    float x[C::kRows][C::kCols] = {};
#pragma unroll 1
    for (int column = 0; column < a.columns; column += C::kChunk) {
      __syncthreads();  // all threads have read the previous chunks
      load_chunk<C::kTileA>(s.a, a, s.work.first_a, s.work.rows_a, column);
      load_chunk<C::kTileB>(s.b, b, first_b, rows_b, column);
      if (a_is_keys && product == 1) mark_poison<C::kTileB>(s.poison, s.b);
      __syncthreads();
      multiply_chunk<C>(x, s);
    }
    float(*s_to)[C::kTileB + C::kPad] = product == 0 ? s.p : s.ds;
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < C::kCols; ++c) s_to[ty + 16 * r][tx + 16 * c] = x[r][c];
    }
  }
}

/// The probability of a score. A row without keys has factor 0, and its scores may be NaN.
__device__ __forceinline__ float probability(float score, float base, float factor,
                                             core::Fault fault) {
  constexpr float kLimit = 100.f;  // P is at most 1 if lse belongs to the inputs
  const float power = (score - base) * static_cast<float>(core::kLog2E);
  const float p = exp2f(power > kLimit ? kLimit : power) * factor;
  if (fault.is(InjectedFault::empty_row_unguarded)) return p;
  return score == core::negative_infinity<float>() || factor == 0.f ? 0.f : p;
}

/// Turns S and dP into P and dZ, or dS without `with_slope`. A thread reads and writes the pairs
/// that it has computed, so no sync is needed before.
template <typename C>
__device__ __forceinline__ void finish_pairs(BwdStorage<C>& s, const BackwardParams& p,
                                             std::int32_t first_b, bool a_is_keys,
                                             bool with_slope) {
  const core::AttentionParams& f = p.fwd;
  const BwdWork& work = s.work;
  const float scale = core::score_scale<float>(f), cap = static_cast<float>(f.softcap);
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll 1
  for (int i = ty; i < C::kTileA; i += 16) {
#pragma unroll 1
    for (int j = tx; j < C::kTileB; j += 16) {
      const int r = a_is_keys ? j : i;
      const std::int32_t query = a_is_keys ? first_b + j : work.first_a + i;
      const std::int32_t key = a_is_keys ? work.first_a + i : first_b + j;
      float prob = 0.f, dz = 0.f;
      if (s.range[r].contains(key)) {
        const float x = s.p[i][j] * scale;
        const core::ScoreRow<float> row{f, work.b, work.h, query};
        const auto distance = static_cast<float>(query + work.seq.mask.diagonal - key);
        const float score = core::modify_score<core::ScalarScoreMath, core::ScoreInput::scaled>(
            x, row, distance, key);
        prob = probability(score, s.base[r], s.factor[r], f.fault);
        if (prob != 0.f) dz = prob * (s.ds[i][j] - s.delta[r]);
        if (cap > 0.f && with_slope && !f.fault.is(InjectedFault::softcap_slope_ignored)) {
          const float tanh = core::capped(x, cap) / cap;
          if (prob != 0.f) dz *= 1.f - tanh * tanh;
        }
        if (prob != 0.f) prob += s.poison[r];
      }
      s.p[i][j] = prob;
      s.ds[i][j] = dz;
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Gradients

/// A thread's columns 64 chunk + 4 tx + {0 … 3} of rows ty + 16 r of a gradient.
template <typename C>
struct Accumulator {
  float x[C::kChunks][C::kRows][4];
};

/// acc += weights · B over one chunk of columns. The sum over a step is added at once.
template <typename C>
__device__ __forceinline__ void accumulate_chunk(float (&acc)[C::kRows][4],
                                                 const float (*s_weights)[C::kTileB + C::kPad],
                                                 const BwdStorage<C>& s) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  float step[C::kRows][4] = {};
#pragma unroll 2
  for (int j = 0; j < C::kTileB; j += 4) {
    float4 w[C::kRows];
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      w[r] = *reinterpret_cast<const float4*>(&s_weights[ty + 16 * r][j]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 b = *reinterpret_cast<const float4*>(&s.b[j + i][4 * tx]);
#pragma unroll
      for (int r = 0; r < C::kRows; ++r) {
        const float weight = i == 0 ? w[r].x : i == 1 ? w[r].y : i == 2 ? w[r].z : w[r].w;
        step[r][0] = fmaf(weight, b.x, step[r][0]);
        step[r][1] = fmaf(weight, b.y, step[r][1]);
        step[r][2] = fmaf(weight, b.z, step[r][2]);
        step[r][3] = fmaf(weight, b.w, step[r][3]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
    for (int c = 0; c < 4; ++c) acc[r][c] += step[r][c];
  }
}

/// acc += weights · B.
template <typename C>
__device__ __forceinline__ void accumulate(Accumulator<C>& acc,
                                           const float (*s_weights)[C::kTileB + C::kPad],
                                           BwdStorage<C>& s, const StridedRows& b,
                                           std::int32_t first_b, int rows_b) {
#pragma unroll 1
  for (int chunk = 0; chunk * C::kChunk < b.columns; ++chunk) {
    __syncthreads();  // all threads have read the previous chunk and written their weights
    load_chunk<C::kTileB>(s.b, b, first_b, rows_b, chunk * C::kChunk);
    clean_chunk<C::kTileB>(s.b);
    __syncthreads();
    // Registers cannot be indexed at run time: unroll and select the chunk.
#pragma unroll
    for (int c = 0; c < C::kChunks; ++c) {
      if (c == chunk) accumulate_chunk<C>(acc.x[c], s_weights, s);
    }
  }
}

/// Stores acc * scale to rows [first, first + rows) of a gradient.
template <typename C>
__device__ __forceinline__ void store(const Accumulator<C>& acc, void* g_to, const StridedRows& to,
                                      std::int32_t first, int rows, float scale) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    if (ty + 16 * r >= rows) continue;
    const std::int64_t at = to.first + (first + ty + 16 * r) * to.row;
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk) {
      const int column = chunk * C::kChunk + 4 * tx;
      if (column >= to.columns) continue;
      float x[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] = acc.x[chunk][r][c] * scale;
      store_columns(g_to, to.element, at, to.column, column, to.columns, x, to.vec4);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Work tiles

/// Selects the sequence and the rows of A for (b, h). All threads call it.
template <typename C>
__device__ __forceinline__ void select_work(BwdStorage<C>& s, const BackwardParams& p,
                                            const core::BackwardTile& tile, std::int32_t b,
                                            std::int32_t h, std::int32_t kv_head) {
  __syncthreads();  // all threads have read the previous work
  if (threadIdx.x == 0) {
    BwdWork& work = s.work;
    work.tile = tile;
    work.seq = core::seq_info_of(p.fwd, b);
    report(p.fwd, work.seq.error);
    if (p.fwd.fault.is(InjectedFault::bwd_mask_ignored)) {
      work.seq.mask.left = work.seq.mask.right = -1;
    }
    work.b = b;
    work.h = h;
    work.kv_head = kv_head;
    work.first_a = tile.tile * C::kTileA;
    const bool keys = tile.output == BackwardOutput::dkdv;
    work.rows_a = min(C::kTileA, (keys ? work.seq.kv_len : work.seq.q_len) - work.first_a);
  }
  __syncthreads();
}

/// The rows of B that the rows of A meet, as [begin, end).
template <typename C>
__device__ __forceinline__ KeyRange rows_of_b(const BackwardParams& p, const BwdWork& work) {
  if (work.tile.output == BackwardOutput::dkdv) {
    const bool drops = p.fwd.fault.is(InjectedFault::last_query_tile_dropped);
    return {0, work.seq.q_len - (drops ? C::kTileB : 0)};
  }
  const KeyRange seen =
      core::keys_seen_by_any(work.seq.mask, work.first_a, work.first_a + work.rows_a - 1);
  if (work.tile.output == BackwardOutput::dq) {
    return {core::tile_begin(seen.begin, C::kTileB), seen.end};
  }
  const std::int32_t first = work.tile.first_key;
  const KeyRange step = core::intersect({first, first + C::kTileB}, seen);
  return step.empty() ? KeyRange{0, 0} : KeyRange{first, step.end};
}

/// acc1 += dZ B1 and, if A is keys, acc2 += P B2, over the steps of B. dbias: acc1 += dS.
template <typename C>
__device__ __forceinline__ void add_steps(BwdStorage<C>& s, const BackwardParams& p,
                                          Accumulator<C>& acc1, Accumulator<C>& acc2) {
  static_assert(C::kCols <= 4, "dbias is summed in chunk 0 of acc1");
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const BwdWork& work = s.work;
  const bool a_is_keys = work.tile.output == BackwardOutput::dkdv;
  const bool is_dbias = work.tile.output == BackwardOutput::dbias;
  const KeyRange all = rows_of_b<C>(p, work);
  if (!a_is_keys) load_stats<C>(s, p, work.first_a, work.rows_a);  // multiply() syncs
#pragma unroll 1
  for (std::int32_t first = all.begin; first < all.end; first += C::kTileB) {
    const int rows = min(C::kTileB, (a_is_keys ? work.seq.q_len : all.end) - first);
    if (a_is_keys) {
      const KeyRange seen = core::keys_seen_by_any(work.seq.mask, first, first + rows - 1);
      const KeyRange keys{work.first_a, work.first_a + work.rows_a};
      if (core::intersect(seen, keys).empty()) continue;  // uniform over the CTA
      __syncthreads();  // all threads have read the previous statistics
      load_stats<C>(s, p, first, rows);
      __syncthreads();
    }
    multiply<C>(s, p, a_is_keys, first, rows);
    finish_pairs<C>(s, p, first, a_is_keys, !is_dbias);
    if (is_dbias) {
#pragma unroll
      for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
        for (int c = 0; c < C::kCols; ++c) acc1.x[0][r][c] += s.ds[ty + 16 * r][tx + 16 * c];
      }
      continue;
    }
    if (a_is_keys && p.dv != nullptr) {
      accumulate<C>(acc2, s.p, s, rows_of_operand(p, work, BwdOperand::dout), first, rows);
    }
    if (a_is_keys && p.dk == nullptr) continue;
    const bool twice = !a_is_keys && first == 0 && p.fwd.fault.is(InjectedFault::dq_tile_twice);
#pragma unroll 1
    for (int times = twice ? 2 : 1; times > 0; --times) {
      accumulate<C>(acc1, s.ds, s, rows_of_operand(p, work, operand_b(a_is_keys, 0)), first, rows);
    }
  }
}

/// The parts of a work tile: batch entries, query heads and query tiles that are summed.
struct BwdParts {
  KeyRange b, h, tile;
};

__device__ __forceinline__ BwdParts parts_of(const BackwardParams& p,
                                             const core::BackwardTile& tile) {
  const core::Fault fault = p.fwd.fault;
  BwdParts parts;
  parts.b = KeyRange{tile.b, tile.b + 1};
  parts.h = KeyRange{tile.head, tile.head + 1};
  parts.tile = KeyRange{tile.tile, tile.tile + 1};
  if (tile.output == BackwardOutput::dkdv) {  // the query heads of the group
    const bool last_only = fault.is(InjectedFault::group_last_head_only);
    parts.h.begin = tile.head * p.group + (last_only ? p.group - 1 : 0);
    parts.h.end = (tile.head + 1) * p.group;
  } else if (tile.output == BackwardOutput::dbias) {  // the axes that the bias repeats
    const bool one_batch = p.dbias_batch > 1 || fault.is(InjectedFault::dbias_first_batch);
    if (!one_batch) parts.b.end = p.fwd.batch;
    if (p.dbias_heads == 1) parts.h.end = p.fwd.q_heads;
    if (p.dbias_rows == 1) parts.tile = KeyRange{0, p.fwd.q_tiles};
  }
  return parts;
}

/// Stores the sums of a dbias tile. If dbias has one row, it is the sum of all rows.
template <typename C>
__device__ __forceinline__ void store_dbias(const float (&sum)[C::kRows][4], BwdStorage<C>& s,
                                            const BackwardParams& p,
                                            const core::BackwardTile& tile) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
    for (int c = 0; c < C::kCols; ++c) s.ds[ty + 16 * r][tx + 16 * c] = sum[r][c];
  }
  __syncthreads();
  const std::int32_t first_row = tile.tile * C::kTileA;
  const bool one_row = p.dbias_rows == 1;
  const int rows = one_row ? 1 : min(C::kTileA, p.dbias_rows - first_row);
  const int keys = min(C::kTileB, p.fwd.kv_len - tile.first_key);
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * C::kTileB; i += C::kThreads) {
    const int row = i / C::kTileB, key = i % C::kTileB;
    if (key >= keys) continue;
    float x = s.ds[row][key];
    if (one_row) {
#pragma unroll 1
      for (int r = 1; r < C::kTileA; ++r) x += s.ds[r][key];
    }
    const float four[4] = {x, 0.f, 0.f, 0.f};
    const std::int64_t at = core::row_offset(p.dbias_strides, tile.b, tile.head, first_row + row);
    store_columns(p.dbias, p.dbias_element, at + (tile.first_key + key) * p.dbias_strides.column, 0,
                  0, 1, four, false);
  }
}

/// Stores the gradients of a dkdv or dq tile.
template <typename C>
__device__ __forceinline__ void store_gradients(const BwdWork& work, const BackwardParams& p,
                                                const Accumulator<C>& acc1,
                                                const Accumulator<C>& acc2) {
  const core::AttentionParams& f = p.fwd;
  const auto scale = static_cast<float>(p.scale);
  if (work.tile.output == BackwardOutput::dq) {
    const bool unscaled = f.fault.is(InjectedFault::dq_scale_missing);
    store<C>(
        acc1, p.dq,
        strided_rows(p.dq, p.dq_element, p.dq_strides, work.b, work.h, work.seq.q_row, f.head_dim),
        work.first_a, work.rows_a, unscaled ? 1.f : scale);
    return;
  }
  // Dense rows past the sequence's keys are written here, varlen rows were zeroed before.
  const bool whole = f.cu_seqlens_k == nullptr && !f.fault.is(InjectedFault::dk_tail_unwritten);
  const int rows = whole ? min(C::kTileA, f.kv_len - work.first_a) : work.rows_a;
  if (p.dk != nullptr) {
    const bool twice = f.fault.is(InjectedFault::dk_scale_twice);
    store<C>(acc1, p.dk,
             strided_rows(p.dk, p.dk_element, p.dk_strides, work.b, work.kv_head, work.seq.k_row,
                          f.head_dim),
             work.first_a, rows, twice ? scale * scale : scale);
  }
  if (p.dv != nullptr) {
    store<C>(acc2, p.dv,
             strided_rows(p.dv, p.dv_element, p.dv_strides, work.b, work.kv_head, work.seq.k_row,
                          f.v_dim),
             work.first_a, rows, 1.f);
  }
}

/// One copy of the code serves all outputs.
template <typename C>
__device__ __forceinline__ void compute_tile(BwdStorage<C>& s, const BackwardParams& p,
                                             core::BackwardTile tile) {
  const BwdParts parts = parts_of(p, tile);
  const bool is_dkdv = tile.output == BackwardOutput::dkdv;
  const core::BackwardTile stored = tile;
  Accumulator<C> acc1 = {}, acc2 = {};
#pragma unroll 1
  for (std::int32_t b = parts.b.begin; b < parts.b.end; ++b) {
#pragma unroll 1
    for (std::int32_t h = parts.h.begin; h < parts.h.end; ++h) {
#pragma unroll 1
      for (tile.tile = parts.tile.begin; tile.tile < parts.tile.end; ++tile.tile) {
        select_work<C>(s, p, tile, b, h, is_dkdv ? tile.head : h / p.group);
        if (s.work.rows_a > 0) add_steps<C>(s, p, acc1, acc2);
      }
    }
  }
  if (tile.output == BackwardOutput::dbias) {
    store_dbias<C>(acc1.x[0], s, p, stored);
    return;
  }
  // Without query heads.
  if (parts.h.empty()) select_work<C>(s, p, stored, tile.b, 0, tile.head);
  store_gradients<C>(s.work, p, acc1, acc2);
}

/// The CTA's share of the work tiles that are wanted.
template <typename C, typename Wanted>
__device__ __forceinline__ void compute_tiles(BwdStorage<C>& s, const BackwardParams& p,
                                              Wanted wanted) {
  const core::BackwardGrid grid = core::backward_grid(p);
#pragma unroll 1
  for (std::int64_t index = blockIdx.x; index < grid.total(); index += gridDim.x) {
    const core::BackwardTile tile = core::backward_tile(p, grid, index);
    if (!wanted(tile)) continue;
    compute_tile<C>(s, p, tile);
  }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 2)
    bwd_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(16) unsigned char s_bytes[];
  core::spin_if_injected(p.fwd.fault, p.fwd.q_len);
  compute_tiles<C>(*reinterpret_cast<BwdStorage<C>*>(s_bytes), p,
                   [](const core::BackwardTile&) { return true; });
}

}  // namespace flashcore::cuda::simt
