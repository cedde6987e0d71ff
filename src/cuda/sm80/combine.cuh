// Split-KV without a cluster: the last CTA of a work tile combines the partial results in the
// workspace. Other SMs wrote them, so loads bypass L1. The combine is latency-bound: many loads are
// in flight at once.
#pragma once

#include "core/combine.h"
#include "core/sm80_roles.h"
#include "cuda/primitives/memory.cuh"
#include "cuda/sm80/output.cuh"

namespace flashcore::cuda::sm80 {

/// Marks the partial result of a split past the end of its sequence as empty. Nothing waits for it,
/// and nothing else of it is read.
__device__ __forceinline__ void store_empty_partials(const AttentionParams& p,
                                                     const WorkTile& work) {
  for (int r = threadIdx.x; r < work.rows; r += blockDim.x) {
    static_cast<float*>(p.partial_lse)[partial_of(p, work, row_of(p, work, r), work.split)] =
        core::negative_infinity<float>();
  }
}

inline constexpr float kNoWeight = -1.f;  // of an empty partial result: its O is not read

/// A lane's addresses in a row's partial results.
struct RowPartials {
  const float* g_lse;  // of split `lane`
  const float* g_out;  // four columns of split 0
};

/// Distance between the splits' results of a row.
struct SplitStrides {
  std::int64_t lse, out;
};

__device__ __forceinline__ RowPartials partials_of(const AttentionParams& p, const WorkTile& work,
                                                   int r, const SplitStrides& strides) {
  const int lane = threadIdx.x % 32;
  const std::int64_t first = partial_of(p, work, row_of(p, work, r), 0);
  return {static_cast<const float*>(p.partial_lse) + first + lane * strides.lse,
          static_cast<const float*>(p.partial_out) + first * p.v_dim + 4 * lane};
}

/// A warp combines the splits of a row. Latency is all that counts: each lane computes the weights
/// of some splits while the outputs are in flight.
template <typename C, bool kFastPath>
__device__ __forceinline__ void combine_row(float* s_weights, const AttentionParams& p,
                                            const WorkTile& work, int r,
                                            const RowPartials& partials,
                                            const SplitStrides& strides) {
  constexpr int kLaneSplits = core::kMaxCombinedSplits / 32;
  constexpr int kLoads = !C::kWarpPrivateKv ? 4 : kFastPath ? 16 : 8;
  const int lane = threadIdx.x % 32;
  const int columns = kFastPath ? C::kHeadDim : p.v_dim;
  float4 out[kLoads];  // as many as registers allow
  const auto load = [&](int first_column, int split) {
    const float* g_out = partials.g_out + first_column + split * strides.out;
    const int left = columns - first_column - 4 * lane;  // may be <= 0
    const auto load_by = [&](auto load_four) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i, g_out += strides.out) {
        if (split + i < work.splits && left > 0) out[i] = load_four(g_out);
      }
    };
    if (kFastPath || p.v_dim % 4 == 0) {
      load_by([](const float* g) { return __ldcg(reinterpret_cast<const float4*>(g)); });
    } else {
      load_by([&](const float* g) { return load_columns(g, left); });
    }
  };
  float weight[kLaneSplits];
#pragma unroll
  for (int k = 0; k < kLaneSplits; ++k) {
    weight[k] = lane + 32 * k < work.splits ? __ldcg(partials.g_lse + 32 * k * strides.lse)
                                            : core::negative_infinity<float>();
  }
  if constexpr (kFastPath) load(0, 0);  // the general path has one copy of the loads
  const Row row = row_of(p, work, r);
  const float sink =
      p.sinks != nullptr ? p.sinks[row.head * p.sinks_stride] : core::negative_infinity<float>();
  core::SoftmaxState<float> all{sink, 0.f};
#pragma unroll
  for (const float lse : weight) all.max = max_ignore_nan(all.max, lse);
  all.max = warp_max(all.max);
#pragma unroll
  for (int k = 0; k < kLaneSplits; ++k) {
    const bool empty = weight[k] == core::negative_infinity<float>();
    const float applied = core::partial_weight<FastMath>(weight[k], all.max);
    if (!empty) all.sum += applied;
    const bool twice = p.fault.is(InjectedFault::combine_double_counts);
    s_weights[lane + 32 * k] = empty ? kNoWeight : twice ? applied * applied : applied;
  }
  all.sum = warp_sum(all.sum);
  if (p.sinks != nullptr) {
    all.sum += core::partial_weight<FastMath>(sink, all.max);
  }
  const float factor = fast_output_factor(all.sum);
  __syncwarp();
  const bool written = !fault_skips_row(p, work, row);
#pragma unroll 1
  for (int first_column = 0; first_column < columns; first_column += 128) {
    float x[4] = {};
#pragma unroll 1
    for (int split = 0; split < work.splits; split += kLoads) {
      if (!kFastPath || first_column > 0 || split > 0) load(first_column, split);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const float applied = s_weights[split + i];  // kNoWeight past the last split
        if (applied == kNoWeight) continue;
        x[0] = fmaf(applied, out[i].x, x[0]);
        x[1] = fmaf(applied, out[i].y, x[1]);
        x[2] = fmaf(applied, out[i].z, x[2]);
        x[3] = fmaf(applied, out[i].w, x[3]);
      }
    }
    const int column = first_column + 4 * lane;
    if (column >= columns || !written) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] *= factor;
      core::assert_output(p, work.seq, work.b, row.head, row.query, x[i]);
    }
    store_output_columns<C, kFastPath>(p, output_offset(p, work, row), column, x);
  }
  if (lane == 0 && p.lse != nullptr && written) store_lse(p, work, row, core::log_sum_exp(all));
  __syncwarp();  // before the weights of the next row
}

/// A thread of a CTA that stores its partial result in the workspace.
template <typename C, bool kFastPath>
struct SplitThread {
  static constexpr int kThreads = C::kThreads;
  static constexpr int kWarps = kThreads / 32;
  SharedStorage<C>& s;
  const AttentionParams& p;
  const WorkTile& work;
  SplitStrides strides;
  RowPartials partials;  // of row index()

  __device__ __forceinline__ SplitThread(SharedStorage<C>& s_, const AttentionParams& p_,
                                         const WorkTile& work_)
      : s(s_), p(p_), work(work_) {
    // Computes the addresses here, while other warps still store, not after the counter's reply.
    strides = {core::partial_rows(p), core::partial_rows(p) * p.v_dim};
    partials = partials_of(p, work, min(index(), work.rows - 1), strides);
    asm volatile(""
                 : "+l"(partials.g_lse), "+l"(partials.g_out), "+l"(strides.lse),
                   "+l"(strides.out));
  }

  __device__ __forceinline__ bool has_fault(InjectedFault fault) const { return p.fault.is(fault); }
  __device__ __forceinline__ bool has_first_thread() const { return threadIdx.x == 0; }
  __device__ __forceinline__ int index() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int splits() const { return work.splits; }
  __device__ __forceinline__ int rows() const { return work.rows; }
  __device__ __forceinline__ void sync_cta() const { __syncthreads(); }
  __device__ __forceinline__ std::uint32_t count(int wraps_at) const {
    return atomic_inc_acq_rel(p.counters + work.index, wraps_at);
  }
  __device__ __forceinline__ void set_last(bool last) const { s.last = last; }
  __device__ __forceinline__ bool is_last() const { return s.last; }

  __device__ __forceinline__ void combine_row(int r) {
    float* s_weights = &s.staged.acc_o[0][0][0] + index() * core::kMaxCombinedSplits;
    static_assert(sizeof(s.staged.acc_o) >= kWarps * core::kMaxCombinedSplits * sizeof(float));
    if (r != index()) partials = partials_of(p, work, r, strides);
    sm80::combine_row<C, kFastPath>(s_weights, p, work, r, partials, strides);
  }
};

}  // namespace flashcore::cuda::sm80
