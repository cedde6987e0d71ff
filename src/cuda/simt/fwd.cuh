// Attention forward on CUDA cores: softmax(Q K^T) V with online softmax, for any GPU from sm_75.
// The readable baseline: every option, every layout, f32 arithmetic. Loads and stores select the
// element format at run time.
//
//   grid     one CTA per work tile (batch, query head, query tile, KV split); CTAs loop if the grid
//            is smaller than the number of tiles
//   CTA      256 threads = 16 rows (ty) x 16 columns (tx). A thread owns query rows ty + 16 r. Per
//            row it holds the scores of keys tx + 16 c and four columns of O per chunk
//   chunks   K and V pass through shared memory 64 columns at a time
//   smem     Q [tile_q][head_dim + 4], K chunk or P, V chunk, all f32. Rows are padded by four
//            floats, so that 16-byte accesses to adjacent rows hit different banks
//   syncs    before a chunk is overwritten and after it is filled
#pragma once

#include <cuda_runtime.h>

#include "core/assert.h"
#include "core/element.h"
#include "core/mask.h"
#include "core/params.h"
#include "core/row_offset.h"
#include "core/score.h"
#include "core/seq_info.h"
#include "core/softmax.h"
#include "cuda/primitives/compiler.cuh"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/primitives/report.cuh"

namespace flashcore::cuda::simt {

using core::AttentionParams;
using core::InjectedFault;
using core::KeyRange;

template <int kHeadDim_, int kTileQ_, int kTileK_, int kStages_, int kWarpRows_, int kThreads_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;  // head_dim and v_dim at most
  static constexpr int kTileQ = kTileQ_;
  static constexpr int kTileK = kTileK_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kRows = kTileQ / 16;  // per thread
  static constexpr int kKeys = kTileK / 16;  // per thread
  static constexpr int kChunk = 64;          // columns of K or V in shared memory at a time
  static constexpr int kChunks = kHeadDim / kChunk;
  static constexpr int kPad = 4;
  static_assert(kHeadDim % kChunk == 0 && kTileQ % 16 == 0 && kTileK % 16 == 0);
  static_assert(kStages_ == 1 && kWarpRows_ == 0 && kThreads == 256);
};

/// A work tile. One thread writes it, all threads of the CTA read it.
struct alignas(16) WorkTile {
  core::SeqInfo seq;
  std::int32_t b, h, split;
  std::int32_t first_query, queries;
  KeyRange visible;        // keys of the split that any query of the tile sees
  KeyRange fully_visible;  // keys of the split that all queries of the tile see
};

template <typename C>
struct alignas(16) SharedStorage {
  WorkTile work;
  float q[C::kTileQ][C::kHeadDim + C::kPad];  // scaled by score_scale
  union {
    float k[C::kTileK][C::kChunk + C::kPad];
    float p[C::kTileQ][C::kTileK + C::kPad];
  };
  float v[C::kTileK][C::kChunk + C::kPad];
};

// ---------------------------------------------------------------------------------------------
// Loading

/// A strided matrix in global memory: Q, K or V of one sequence and head. The 8-bit path recomputes
/// its head and scale for every row from params and work: values kept in registers would spill.
struct Matrix {
  const void* g_head;  // the head's first element in batch 0 or page 0
  core::KvRowMap rows;
  core::Strides strides;
  std::int32_t columns;
  core::Element element;
  const core::Scales& scales;
  const AttentionParams& params;
  const WorkTile& work;
  bool of_keys;

  /// Row i. T is as wide as an element.
  template <typename T>
  __device__ __forceinline__ const T* row(std::int32_t i) const {
    const core::KvLocation place = rows.at(i);
    return static_cast<const T*>(g_head) + place.block * strides.batch + place.row * strides.row;
  }
  /// The scale of row i of an 8-bit matrix.
  __device__ __forceinline__ float row_scale_of(std::int32_t i) const {
    const std::int32_t head = of_keys ? core::kv_head_of(params, work.h) : work.h;
    return core::row_scale(params, element, scales, work.b, head, i);
  }
};

/// The address of element `offset`: the head's first element.
__device__ __forceinline__ const void* head_of(const void* g_data, core::Element element,
                                               std::int64_t offset) {
  const int bytes_log2 = core::is_8bit(element) ? 0 : element == core::Element::f32 ? 2 : 1;
  return static_cast<const std::uint8_t*>(g_data) + (offset << bytes_log2);
}

/// Loads four columns, from `column` on, of rows threadIdx.x / 16 + 16 n. Rows and columns past the
/// end are zero. T is as wide as an element.
template <typename T, int kCount>
__device__ __forceinline__ void load_fours(Four<T> (&x)[kCount], const Matrix& matrix,
                                           std::int32_t first_row, int rows, int column) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const int r = threadIdx.x / 16 + 16 * n;
    x[n] = {};
    if (r < rows && column < matrix.columns) {
      x[n] = *reinterpret_cast<const Four<T>*>(matrix.row<T>(first_row + r) + column);
    }
  }
}

/// Loads up to four columns of a row, with any column stride. Columns past the end are zero.
template <typename T>
__device__ __forceinline__ Four<T> gather_four(const Matrix& matrix, std::int32_t row, int column) {
  const T* g_row = matrix.row<T>(row);
  Four<T> x = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column + i < matrix.columns) x.x[i] = g_row[(column + i) * matrix.strides.column];
  }
  return x;
}

/// s_tile[r][c] = factor * matrix[first_row + r][first_column + c] for r < kRows, c < 64. Rows from
/// `rows` on and columns past the end are zero, so that they never affect the result.
template <int kRows, int kStride>
__device__ __forceinline__ void load_chunk(float (*s_tile)[kStride], int s_column,
                                           const Matrix& matrix, std::int32_t first_row, int rows,
                                           int first_column, float factor, bool vector_rows) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const int column = first_column + 4 * tx;
  // opaque(): compares the format for every chunk. Results kept in registers would cause spills.
  const auto element = static_cast<core::Element>(opaque(static_cast<int>(matrix.element)));
  const bool is_f32 = element == core::Element::f32;
  const bool is_f16 = element == core::Element::f16;
  const auto store = [&](int r, float4 x) {
    *reinterpret_cast<float4*>(&s_tile[r][s_column + 4 * tx]) =
        make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
  };
  const auto store_all = [&](const auto& x, auto floats_of) {
#pragma unroll
    for (int n = 0; n < kRows / 16; ++n) store(ty + 16 * n, floats_of(x[n]));
  };
  if (core::is_8bit(element)) {
    // Rolled loops: this path handles any layout and format, and must not cost the other paths
    // registers.
#pragma unroll 1
    for (int r = ty; r < kRows; r += 16) {
      const int count = r < rows ? min(4, matrix.columns - column) : 0;
      const std::uint8_t* g_row = nullptr;
      float scale = 0.f;
      if (count > 0) {
        g_row = matrix.row<std::uint8_t>(first_row + r);
        scale = matrix.row_scale_of(first_row + r);
      }
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        float x = 0.f;
        if (i < count) {
          const std::uint32_t code = g_row[(column + i) * matrix.strides.column];
          x = decode_8bit(element, code & core::code_mask(matrix.params) & 0xff) * scale;
        }
        s_tile[r][s_column + 4 * tx + i] = x * factor;
      }
    }
  } else if (vector_rows && is_f32) {  // the number of columns is a multiple of four
    Four<float> x[kRows / 16];
    load_fours(x, matrix, first_row, rows, column);
    store_all(x, [](const Four<float>& four) { return to_floats(four); });
  } else if (vector_rows) {
    Four<std::uint16_t> x[kRows / 16];
    load_fours(x, matrix, first_row, rows, column);
    if (is_f16) {
      store_all(x, bits_to_floats<__half>);
    } else {
      store_all(x, bits_to_floats<__nv_bfloat16>);
    }
  } else {
#pragma unroll 1
    for (int r = ty; r < kRows; r += 16) {
      float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
      if (r < rows && is_f32) {
        x = to_floats(gather_four<float>(matrix, first_row + r, column));
      } else if (r < rows) {
        const auto bits = gather_four<std::uint16_t>(matrix, first_row + r, column);
        x = is_f16 ? bits_to_floats<__half>(bits) : bits_to_floats<__nv_bfloat16>(bits);
      }
      store(r, x);
    }
  }
}

template <typename C>
__device__ __forceinline__ void load_queries(SharedStorage<C>& s, const AttentionParams& p,
                                             const WorkTile& work) {
  const Matrix q{head_of(p.q, p.q_element, work.h * p.q_strides.head),
                 core::kv_row_map({}, work.b, work.seq.q_row),
                 p.q_strides,
                 p.fault.is(InjectedFault::head_dim_truncated) ? p.head_dim - 1 : p.head_dim,
                 p.q_element,
                 p.q_scale,
                 p,
                 work,
                 false};
  const float factor = core::score_scale<float>(p);
  for (int chunk = 0; chunk < C::kChunks; ++chunk) {
    load_chunk<C::kTileQ>(s.q, chunk * C::kChunk, q, work.first_query, work.queries,
                          chunk * C::kChunk, factor, p.vector_rows);
  }
}

// ---------------------------------------------------------------------------------------------
// Scores

/// score[r][c] += Q[row r] · K[key c] over one chunk of columns.
template <typename C>
__device__ __forceinline__ void multiply_chunk(float (&score)[C::kRows][C::kKeys],
                                               const SharedStorage<C>& s, int first_column) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll 4
  for (int d = 0; d < C::kChunk; d += 4) {
    float4 q[C::kRows], k[C::kKeys];
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      q[r] = *reinterpret_cast<const float4*>(&s.q[ty + 16 * r][first_column + d]);
    }
#pragma unroll
    for (int c = 0; c < C::kKeys; ++c) {
      k[c] = *reinterpret_cast<const float4*>(&s.k[tx + 16 * c][d]);
    }
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < C::kKeys; ++c) {
        score[r][c] = fmaf(q[r].x, k[c].x, score[r][c]);
        score[r][c] = fmaf(q[r].y, k[c].y, score[r][c]);
        score[r][c] = fmaf(q[r].z, k[c].z, score[r][c]);
        score[r][c] = fmaf(q[r].w, k[c].w, score[r][c]);
      }
    }
  }
}

/// Applies score modifications and masks. Returns early if all rows see all keys of the tile and
/// the call has no modification. The scores pass through shared memory (s.p, free once K is read),
/// where a rolled loop can index them: in registers the unrolled code would cost occupancy.
template <typename C>
__device__ __forceinline__ void apply_mods_and_mask(float (&score)[C::kRows][C::kKeys],
                                                    SharedStorage<C>& s, const AttentionParams& p,
                                                    const WorkTile& work, std::int32_t first_key) {
  const bool all_visible =
      first_key >= work.fully_visible.begin && first_key + C::kTileK <= work.fully_visible.end;
  if (p.fast_path && all_visible) return;  // uniform over the CTA
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  __syncthreads();  // all threads have read K
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
    for (int c = 0; c < C::kKeys; ++c) s.p[ty + 16 * r][tx + 16 * c] = score[r][c];
  }
#pragma unroll 1
  for (int r = ty; r < work.queries; r += 16) {
    const std::int32_t i = work.first_query + r;
    const KeyRange range = core::intersect(core::visible_keys(work.seq.mask, i), work.visible);
    const core::ScoreRow<float> row{p, work.b, work.h, i};
#pragma unroll 1
    for (int c = tx; c < C::kTileK; c += 16) {
      float& x = s.p[r][c];  // private to this thread until the next sync
      if (!range.contains(first_key + c)) {
        x = core::negative_infinity<float>();
      } else if (!p.fast_path) {
        const std::int32_t key = first_key + c;
        const auto distance = static_cast<float>(i + work.seq.mask.diagonal - key);
        x = core::modify_score<core::ScalarScoreMath, core::ScoreInput::scaled>(x, row, distance,
                                                                                key);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
    for (int c = 0; c < C::kKeys; ++c) score[r][c] = s.p[ty + 16 * r][tx + 16 * c];
  }
}

// ---------------------------------------------------------------------------------------------
// Online softmax and output

/// A thread's rows: columns 64 chunk + 4 tx + {0 … 3} of O, and the softmax state, which is
/// equal in all threads of a row.
template <typename C>
struct Rows {
  float o[C::kChunks][C::kRows][4];
  core::SoftmaxState<float> state[C::kRows];
};

/// Turns scores into probabilities and updates the state. rescale is the factor of O so far.
template <typename C>
__device__ __forceinline__ void softmax(float (&score)[C::kRows][C::kKeys], Rows<C>& rows,
                                        float (&rescale)[C::kRows], core::Fault fault) {
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    float max = rows.state[r].max;
#pragma unroll
    for (int c = 0; c < C::kKeys; ++c) max = max_ignore_nan(max, score[r][c]);
    max = half_warp_max(max);
    const float base = core::softmax_base(max);
    rescale[r] = fast_exp(rows.state[r].max - base);
    if (fault.is(InjectedFault::rescale_forgotten)) rescale[r] = 1.f;
    rows.state[r].max = max;
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < C::kKeys; ++c) {
      score[r][c] = fast_exp(score[r][c] - base);
      sum += score[r][c];
    }
    rows.state[r].sum = core::add_tile_sum(rows.state[r].sum, rescale[r], half_warp_sum(sum));
  }
}

/// O = O * rescale + P V over one chunk of columns. P V is summed before it is added to O.
template <typename C>
__device__ __forceinline__ void accumulate_chunk(float (&o)[C::kRows][4], const SharedStorage<C>& s,
                                                 const float (&rescale)[C::kRows]) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  float tile[C::kRows][4] = {};
#pragma unroll 4
  for (int key = 0; key < C::kTileK; key += 4) {
    float4 p[C::kRows];
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      p[r] = *reinterpret_cast<const float4*>(&s.p[ty + 16 * r][key]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 v = *reinterpret_cast<const float4*>(&s.v[key + i][4 * tx]);
#pragma unroll
      for (int r = 0; r < C::kRows; ++r) {
        const float weight = i == 0 ? p[r].x : i == 1 ? p[r].y : i == 2 ? p[r].z : p[r].w;
        tile[r][0] = fmaf(weight, v.x, tile[r][0]);
        tile[r][1] = fmaf(weight, v.y, tile[r][1]);
        tile[r][2] = fmaf(weight, v.z, tile[r][2]);
        tile[r][3] = fmaf(weight, v.w, tile[r][3]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
    for (int c = 0; c < 4; ++c) o[r][c] = fmaf(o[r][c], rescale[r], tile[r][c]);
  }
}

template <typename C>
__device__ __forceinline__ void finish(Rows<C>& rows, const AttentionParams& p,
                                       const WorkTile& work) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const bool to_partial = p.splits > 1;
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    if (ty + 16 * r >= work.queries) continue;
    const std::int32_t i = work.first_query + ty + 16 * r;
    const std::int64_t q_row = static_cast<std::int64_t>(work.seq.q_row) + i;
    const bool adds_sink = !to_partial || p.fault.is(InjectedFault::sink_in_every_split);
    const auto final =
        core::finalize_row(rows.state[r], core::sink_of(p, work.h, adds_sink), p.fault);
    const float factor = final.factor, lse = final.lse(p.fault);
    core::assert_row_state(p, work.seq, work.b, work.h, i, final.state, lse);
    if (p.fault.is(InjectedFault::row_not_written) && i == work.seq.q_len - 1) continue;

    const std::int64_t partial = to_partial
                                     ? work.split * core::partial_rows(p) +
                                           core::partial_row(p, work.b, work.h, work.seq.q_row, i)
                                     : 0;
    if (tx == 0) {
      if (to_partial) {
        static_cast<float*>(p.partial_lse)[partial] = lse;
      } else if (p.lse != nullptr) {
        static_cast<float*>(p.lse)[core::row_offset(p.lse_strides, work.b, work.h, q_row)] = lse;
      }
    }
    const std::int64_t offset = core::row_offset(p.out_strides, work.b, work.h, q_row);
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk) {
      const int column = chunk * C::kChunk + 4 * tx;
      if (column >= p.v_dim) continue;
      float x[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        x[c] = core::output_of_keys(rows.o[chunk][r][c], rows.state[r].sum) * factor;
        core::assert_output(p, work.seq, work.b, work.h, i, x[c]);
      }
      if (to_partial) {
        store_columns(p.partial_out, core::Element::f32, partial * p.v_dim, 1, column, p.v_dim, x,
                      p.v_dim % 4 == 0);
      } else {
        store_columns(p.out, p.out_element, offset, p.out_strides.column, column, p.v_dim, x,
                      p.vector_rows);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Work tiles

/// Order of tiles: split fastest, then query tiles from the last (longest, if causal) to the first,
/// then head, then batch.
template <typename C>
__device__ __forceinline__ WorkTile decode_work_tile(const AttentionParams& p, std::int64_t index) {
  WorkTile work;
  work.split = static_cast<std::int32_t>(index % p.splits);
  index /= p.splits;
  const std::int32_t tile = p.q_tiles - 1 - static_cast<std::int32_t>(index % p.q_tiles);
  index /= p.q_tiles;
  work.h = static_cast<std::int32_t>(index % p.q_heads);
  work.b = static_cast<std::int32_t>(index / p.q_heads);
  work.seq = core::seq_info_of(p, work.b);
  work.first_query = tile * C::kTileQ;
  work.queries = min(C::kTileQ, work.seq.q_len - work.first_query);
  if (work.queries <= 0) return work;
  const std::int32_t last_query = work.first_query + work.queries - 1;
  work.visible =
      core::intersect(core::keys_seen_by_any(work.seq.mask, work.first_query, last_query),
                      core::split_keys(work.split, p.keys_per_split, work.seq.kv_len));
  work.fully_visible = core::intersect(
      core::keys_seen_by_all(work.seq.mask, work.first_query, last_query), work.visible);
  return work;
}

template <typename C>
__device__ __forceinline__ void mainloop(SharedStorage<C>& s, const AttentionParams& p,
                                         const WorkTile& work) {
  const std::int32_t kv_head = core::kv_head_of(p, work.h);
  const core::KvRowMap kv_row_map = core::kv_row_map(p, work.seq, work.b);
  const Matrix k{head_of(p.k, p.k_element, kv_head * p.k_strides.head),
                 kv_row_map,
                 p.k_strides,
                 p.head_dim,
                 p.k_element,
                 p.k_scale,
                 p,
                 work,
                 true};
  const Matrix v{head_of(p.v, p.v_element, kv_head * p.v_strides.head),
                 kv_row_map,
                 p.v_strides,
                 p.v_dim,
                 p.v_element,
                 p.v_scale,
                 p,
                 work,
                 true};
  Rows<C> rows = {};
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) rows.state[r].max = core::negative_infinity<float>();

  load_queries<C>(s, p, work);
  for (std::int32_t first_key = work.visible.empty()
                                    ? work.visible.end
                                    : core::tile_begin(work.visible.begin, C::kTileK);
       first_key < work.visible.end; first_key += C::kTileK) {
    const int keys = min(C::kTileK, work.visible.end - first_key);

    // S = Q K^T
    float score[C::kRows][C::kKeys] = {};
    for (int column = 0; column < p.head_dim; column += C::kChunk) {
      __syncthreads();  // all threads have read K, P and V
      load_chunk<C::kTileK>(s.k, 0, k, first_key, keys, column, 1.f, p.vector_rows);
      if (column == 0) load_chunk<C::kTileK>(s.v, 0, v, first_key, keys, 0, 1.f, p.vector_rows);
      __syncthreads();  // K chunk, V chunk 0 and, the first time, Q are complete
      multiply_chunk<C>(score, s, column);
    }
    apply_mods_and_mask<C>(score, s, p, work, first_key);
    float rescale[C::kRows];
    softmax<C>(score, rows, rescale, p.fault);

    // P overwrites K.
    __syncthreads();
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < C::kKeys; ++c) s.p[ty + 16 * r][tx + 16 * c] = score[r][c];
    }
    __syncthreads();

    // O = O * rescale + P V
#pragma unroll 1
    for (int chunk = 0; chunk == 0 || (C::kChunks > 1 && chunk * C::kChunk < p.v_dim); ++chunk) {
      if (chunk > 0) {
        __syncthreads();
        load_chunk<C::kTileK>(s.v, 0, v, first_key, keys, chunk * C::kChunk, 1.f, p.vector_rows);
        __syncthreads();
      }
      // Registers cannot be indexed at run time: unroll and select the chunk.
#pragma unroll
      for (int c = 0; c < C::kChunks; ++c) {
        if (c == chunk) accumulate_chunk<C>(rows.o[c], s, rescale);
      }
    }
  }
  finish<C>(rows, p, work);
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 2)
    fwd_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(16) unsigned char s_bytes[];
  SharedStorage<C>& s = *reinterpret_cast<SharedStorage<C>*>(s_bytes);
  core::spin_if_injected(p.fault, p.q_len);
  for (std::int64_t index = blockIdx.x; index < p.num_tiles; index += gridDim.x) {
    __syncthreads();  // all threads have read the previous tile's s.work
    if (threadIdx.x == 0) {
      s.work = decode_work_tile<C>(p, index);
      report(p, s.work.seq.error);
    }
    __syncthreads();
    if (index % (p.num_tiles / p.batch) == 0)
      report_pages(p, s.work.seq, s.work.b, threadIdx.x, C::kThreads);
    if (s.work.queries > 0) mainloop<C>(s, p, s.work);  // uniform over the CTA
  }
}

}  // namespace flashcore::cuda::simt
