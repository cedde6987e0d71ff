// A bias on the scores of a step. Scores with a bias are in natural units: a bias may be close to
// the largest f32, whose product with log2(e) would overflow.
//
//   staged   A 16-bit bias with aligned rows: cp.async brings a warp's rows of the next step to
//            shared memory during this one, and ldmatrix hands them out like accumulators of S. No
//            other warp reads them, so the copies need no barrier.
//   direct   any bias: loads from global memory when S is complete
#pragma once

#include "cuda/primitives/cp_async.cuh"
#include "cuda/primitives/memory.cuh"
#include "cuda/primitives/mma.cuh"
#include "cuda/sm90/score.cuh"
#include "cuda/sm90/softmax.cuh"

namespace flashcore::cuda::sm90 {

/// Scores in natural units. The maximum is subtracted before the multiplication by log2(e).
struct NaturalExponent {
  static constexpr float kLog2E = static_cast<float>(core::kLog2E);
  __device__ __forceinline__ float of(float score) const { return score; }
  __device__ __forceinline__ float minus(float score, float base) const {
    return (score - base) * kLog2E;
  }
  __device__ __forceinline__ float difference(float x, float y) const { return minus(x, y); }
};

/// Two 16-bit elements of a register, the lower half first.
template <typename T>
__device__ __forceinline__ float2 unpack(std::uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack<__half>(std::uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(std::uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

/// A warp's rows of the staged bias in shared memory: [16, tile_k], behind the SharedStorage. Chunk
/// c of 16 bytes of row r is at c ^ (r % 8), so that ldmatrix meets no bank conflicts.
template <typename C>
class StagedBias {
  using T = typename C::Element;
  static constexpr int kRows = 16;
  static constexpr int kRowBytes = 2 * C::kTileK, kChunkKeys = 8;
  static constexpr int kChunks = C::kTileK / kChunkKeys;
  static constexpr int kRowsOfCopy = 32 / kChunks;  // rows that the lanes copy at the same time
  static_assert(32 % kChunks == 0 && kChunks % 8 == 0);

 public:
  __device__ __forceinline__ StagedBias(SharedStorage<C>& s, const Thread<C>& t)
      : s_rows_(shared_address(&s + 1) + (4 * t.group + t.warp) * kRows * kRowBytes) {}

  /// Finds the rows of a work tile.
  __device__ __forceinline__ void begin(const Params& params, const WorkTile& work,
                                        const Thread<C>& t) {
    const std::int64_t offset =
        core::row_offset(params.call.bias_strides, work.b, work.head, first_row(work, t));
    g_chunk_ = static_cast<const T*>(params.call.bias) + offset + chunk(t) * kChunkKeys;
  }

  /// Starts the copy of a tile's bias. Rows past the last query and keys past the sequence's are
  /// zeros. Every lane of the warp has read the tile before.
  __device__ __forceinline__ void load(const Params& params, const WorkTile& work,
                                       const Thread<C>& t, std::int32_t tile) const {
    const std::int32_t rows = work.queries - 64 * t.group - 16 * t.warp;  // may be negative
    const std::int32_t keys = work.seq.kv_len - tile * C::kTileK;
    const std::int64_t step = kRowsOfCopy * params.call.bias_strides.row;
    const int first = t.lane / kChunks;
    // The row is below 8, and copy i is kRowsOfCopy * i rows below it: both parts of the swizzle.
    const std::uint32_t s_first = s_rows_ + first * kRowBytes + ((chunk(t) ^ first) << 4);
    const auto s_chunk = [&](int i) {
      const int row = kRowsOfCopy * i;
      return (s_first ^ (row % 8 << 4)) + row * kRowBytes;
    };
    const T* g_from = g_chunk_ + tile * C::kTileK;
    if (rows >= kRows && keys >= C::kTileK) {
#pragma unroll
      for (int i = 0; i < kRows / kRowsOfCopy; ++i, g_from += step) {
        cp_async_16(s_chunk(i), g_from, 16);
      }
    } else {
      const int bytes = 2 * min(max(keys - chunk(t) * kChunkKeys, 0), kChunkKeys);
#pragma unroll 1
      for (int i = 0; i < kRows / kRowsOfCopy; ++i, g_from += step) {
        const bool reads = first + kRowsOfCopy * i < rows && bytes > 0;
        cp_async_16(s_chunk(i), reads ? g_from : params.call.bias, reads ? bytes : 0);
      }
    }
    cp_async_commit();
  }

  /// S = scale S + bias.
  __device__ __forceinline__ void add(AccS<C>& acc_s, const Thread<C>& t, float scale) const {
    cp_async_wait<0>();
    __syncwarp();
    // Matrices of a load: both halves of n-tile n, then of n + 1. Lanes 8 i … 8 i + 7 have the row
    // addresses of matrix i.
    const int row = t.lane % 16, next = t.lane / 16;
    const std::uint32_t s_first = s_rows_ + row * kRowBytes + ((next ^ (row % 8)) << 4);
#pragma unroll
    for (int n = 0; n < C::kTileK / 8; n += 2) {
      std::uint32_t pairs[4];
      ldmatrix_x4(pairs, s_first ^ (n << 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // n-tile n + i / 2, half i % 2
        const float2 bias = unpack<T>(pairs[i]);
        float* const scores = acc_s + 4 * n + 2 * i;
        scores[0] = fmaf(scores[0], scale, bias.x);
        scores[1] = fmaf(scores[1], scale, bias.y);
      }
    }
    __syncwarp();
  }

 private:
  static __device__ __forceinline__ int chunk(const Thread<C>& t) { return t.lane % kChunks; }
  static __device__ __forceinline__ std::int32_t first_row(const WorkTile& work,
                                                           const Thread<C>& t) {
    return work.first_query + 64 * t.group + 16 * t.warp + t.lane / kChunks;
  }

  const std::uint32_t s_rows_;
  const T* g_chunk_;  // the lane's chunk of its first row
};

/// Stands for the staged bias of a path without one.
template <typename C>
struct NoBias {
  __device__ __forceinline__ NoBias(SharedStorage<C>&, const Thread<C>&) {}
};

/// S = scale S + bias for one row of a thread. Keys from `end` on are not read.
template <typename C, typename T>
__device__ __forceinline__ void add_bias_row(AccS<C>& acc_s, int half, float scale, const T* g_key,
                                             std::int64_t stride, std::int32_t end) {
  struct alignas(2 * sizeof(T)) Pair {
    T x[2];
  };
  const bool pairs = stride == 1 && end > C::kTileK - 7 &&
                     reinterpret_cast<std::uintptr_t>(g_key) % sizeof(Pair) == 0;
#pragma unroll
  for (int n = 0; n < C::kTileK / 8; ++n) {
    float* const scores = acc_s + 4 * n + 2 * half;
    if (pairs) {
      const Pair pair = *reinterpret_cast<const Pair*>(g_key + 8 * n);
#pragma unroll
      for (int i = 0; i < 2; ++i) scores[i] = fmaf(scores[i], scale, to_float(pair.x[i]));
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (8 * n + i < end) {
          scores[i] = fmaf(scores[i], scale, to_float(g_key[(8 * n + i) * stride]));
        }
      }
    }
  }
}

/// S = scale S + bias, straight from global memory. Rows past the last query are not read.
template <typename C>
__device__ __forceinline__ void add_bias(AccS<C>& acc_s, const Thread<C>& t, const Params& params,
                                         const WorkTile& work, std::int32_t tile, float scale) {
  const core::AttentionParams& p = params.call;
  const std::int32_t key = tile * C::kTileK + t.column(0, 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool exists = has_row(work, t, half);
    const std::int64_t offset =
        core::row_offset(p.bias_strides, work.b, work.head, query_of(work, t, half)) +
        key * p.bias_strides.column;
    const std::int32_t end = exists ? work.seq.kv_len - key : 0;
    const auto add = [&](auto zero) {
      add_bias_row<C>(acc_s, half, scale, static_cast<const decltype(zero)*>(p.bias) + offset,
                      p.bias_strides.column, end);
    };
    if (p.bias_element == core::Element::f32) {
      add(0.f);
    } else {
      add(typename C::Element());
    }
  }
}

/// A row whose bias is added after its other modifications (apply_biased_mods).
struct NaturalScoreRow : core::ScoreRow<float> {
  const Params& params;
  const float& s_slope;

  __device__ __forceinline__ float scale() const { return params.score_scale; }
  __device__ __forceinline__ bool has_softcap() const { return params.softcap > 0.f; }
  __device__ __forceinline__ float cap() const { return params.softcap; }
  __device__ __forceinline__ float slope() const { return s_slope; }
  static constexpr bool has_bias() { return false; }
  static constexpr bool has_mask() { return false; }
};

/// Scale, softcap, ALiBi and bias of a tile of S, in natural units.
template <typename C>
__device__ __forceinline__ void apply_biased_mods(AccS<C>& acc_s, const Thread<C>& t,
                                                  const Params& params, const WorkTile& work,
                                                  std::int32_t tile) {
  const bool bias_first = params.call.fault.is(InjectedFault::softcap_after_bias);
  if (bias_first) add_bias<C>(acc_s, t, params, work, tile, 1.f);
  float scale = params.score_scale;
  if (params.softcap > 0.f || params.call.alibi_slopes != nullptr) {
    const std::int32_t first_key = tile * C::kTileK;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t query = query_of(work, t, half);
      const NaturalScoreRow row{
          {params.call, work.b, work.head, query}, params, work.alibi_slopes[0]};
      const float distance = first_distance(t, work, query, first_key);
      core::modify_scores<FastMath, core::ScoreInput::qk>(row, [&](auto change) {
#pragma unroll
        for (int n = 0; n < C::kTileK / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            change(acc_s[4 * n + 2 * half + i], first_key + t.column(0, 0) + 8 * n + i,
                   distance - static_cast<float>(8 * n + i));
          }
        }
      });
    }
    scale = 1.f;
  }
  if (!bias_first) add_bias<C>(acc_s, t, params, work, tile, scale);
}

}  // namespace flashcore::cuda::sm90
