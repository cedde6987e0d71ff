// Epilogue: O and LSE of a work tile to the caller, to the workspace (split-KV), or to the other
// CTAs of a cluster.
#pragma once

#include "cuda/sm80/cluster_combine.cuh"
#include "cuda/sm80/combine.cuh"
#include "cuda/sm80/output.cuh"

namespace flashcore::cuda::sm80 {

/// True if every row of the output can be stored straight from the accumulators.
template <typename C, bool kFastPath>
__device__ __forceinline__ bool stores_from_accumulators(const AttentionParams& p) {
  return p.splits == 1 && (kFastPath || p.vector_rows);
}

/// Stores the thread's columns of a contiguous row: registers 2 half and 2 half + 1 of acc_o[0].
/// For 16-bit rows, neighbouring lanes exchange columns, so that each has four adjacent ones and a
/// quad writes a whole 32-byte sector.
template <typename C, bool kFastPath>
__device__ __forceinline__ void store_accumulated_row(const AccO<C>& acc_o, int half,
                                                      std::int64_t offset, float factor,
                                                      bool written, const AttentionParams& p,
                                                      const Thread<C>& t) {
  const bool odd = t.lane % 2 != 0;
  const auto packed = [&](float low, float high) {
    std::uint32_t pair;
    with_element<C>(p.out_element, [&](auto zero) { pair = pack<decltype(zero)>(low, high); });
    return pair;
  };
  // Lanes 0 and 2 of a quad take columns 0-3 and 4-7 of the first n-tile, lanes 1 and 3 those of
  // the second.
  auto* g_row = static_cast<std::uint16_t*>(p.out) + offset;
  auto* g_f32_row = static_cast<float*>(p.out) + offset;
  const bool is_f32 = p.out_element == core::Element::f32;
  const int column = 8 * (t.lane % 2) + 4 * (t.lane % 4 / 2);
  const auto in_row = [&](int first) {
    return written && (!C::template kAnyDim<kFastPath> || first < p.v_dim);
  };
#pragma unroll
  for (int n = 0; n < C::kColumnTiles; n += 2) {
    if constexpr (C::kKv8) {
      const int first = 8 * n + 4 * (t.lane % 4);
      const float4 x = adjacent_columns<C>(acc_o, 0, n, half);
      if (is_f32 && in_row(first)) {
        *reinterpret_cast<float4*>(g_f32_row + first) =
            make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
      } else if (in_row(first)) {
        *reinterpret_cast<uint2*>(g_row + first) =
            make_uint2(packed(x.x * factor, x.y * factor), packed(x.z * factor, x.w * factor));
      }
    } else if (is_f32) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int first = 8 * (n + i) + 2 * (t.lane % 4);
        if (in_row(first)) {
          *reinterpret_cast<float2*>(g_f32_row + first) = make_float2(
              acc_o[0][n + i][2 * half] * factor, acc_o[0][n + i][2 * half + 1] * factor);
        }
      }
    } else {
      std::uint32_t x[2];  // of the two n-tiles
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[i] = packed(acc_o[0][n + i][2 * half] * factor, acc_o[0][n + i][2 * half + 1] * factor);
      }
      const std::uint32_t theirs = __shfl_xor_sync(0xffffffffu, odd ? x[0] : x[1], 1);
      if (in_row(8 * n + column)) {
        *reinterpret_cast<uint2*>(g_row + 8 * n + column) =
            odd ? make_uint2(theirs, x[1]) : make_uint2(x[0], theirs);
      }
    }
  }
}

/// Normalises and stores row (m, half) of the thread, which registers of `half` of acc_o[0] hold.
template <typename C, bool kFastPath>
__device__ __forceinline__ void finish_accumulated_row(AccO<C>& acc_o, int half,
                                                       const core::SoftmaxState<float>& row_state,
                                                       int r, const Kv8Scales<C>& scales,
                                                       const AttentionParams& p,
                                                       const WorkTile& work, const Thread<C>& t) {
  const Row row = row_of(p, work, min(r, work.rows - 1));
  const core::SoftmaxState<float> state{row_state.max * work.unit, quad_sum(row_state.sum)};
  if (__any_sync(0xffffffffu, state.sum == 0.f)) {  // rare; one branch for the warp
#pragma unroll
    for (int n = 0; n < C::kColumnTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = acc_o[0][n][2 * half + i];
        x = core::output_of_keys(x, state.sum);
      }
    }
  }
  const FinalRow final = finalize_row(p, row, state);
  const float factor = final.factor * output_scale<C>(scales);
  const bool written = r < work.rows && !fault_skips_row(p, work, row);
  if (written && p.lse != nullptr && t.lane % 4 == 0) {
    store_lse(p, work, row, final.lse(p.fault));
  }
  if (written) {
#pragma unroll
    for (int n = 0; n < C::kColumnTiles; ++n) {
      assert_row(p, work, row, final,
                 {acc_o[0][n][2 * half] * factor, acc_o[0][n][2 * half + 1] * factor});
    }
  }
  store_accumulated_row<C, kFastPath>(acc_o, half, output_offset(p, work, row), factor, written, p,
                                      t);
}

/// Stores contiguous rows straight from the accumulators, in two rounds of a rolled loop: unrolled,
/// the stores were a quarter of the kernel.
template <typename C, bool kFastPath>
__device__ __forceinline__ void store_accumulators(AccO<C>& acc_o, const RowStats<C>& row_stats,
                                                   const Kv8Scales<C>& scales,
                                                   const AttentionParams& p, const WorkTile& work,
                                                   const Thread<C>& t) {
  constexpr int kRowsPerRound = C::kRowTiles;
  static_assert(kRowsPerRound <= 2);
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
#pragma unroll
    for (int i = 0; i < kRowsPerRound; ++i) {
      const int m = kRowsPerRound == 2 ? round : 0, half = kRowsPerRound == 2 ? i : round;
      finish_accumulated_row<C, kFastPath>(acc_o, i, row_stats.of[m][half], t.row(m, half), scales,
                                           p, work, t);
    }
    // The rows of the next round.
#pragma unroll
    for (int n = 0; n < C::kColumnTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2 * kRowsPerRound; ++i) {
        acc_o[0][n][i] = kRowsPerRound == 2 ? acc_o[1 % C::kRowTiles][n][i] : acc_o[0][n][2 + i];
      }
    }
  }
}

/// Reduces the staged O over the warps and stores it, four columns at a time: to the caller, or
/// with split-KV to the workspace.
template <typename C, bool kFastPath>
__device__ __forceinline__ void store_output(const StagedOutput<C>& s, const AttentionParams& p,
                                             const WorkTile& work) {
  constexpr int kRowVec4s = C::kHeadDim / 4;
#pragma unroll 1
  for (int index = threadIdx.x; index < work.rows * kRowVec4s; index += C::kThreads) {
    const int r = index / kRowVec4s, column = 4 * (index % kRowVec4s);
    const Row row = row_of(p, work, r);
    if (fault_skips_row(p, work, row)) continue;
    float x[4] = {};
    const FinalRow final = finalize_row(p, row, reduce_key_warps<C>(s, r, column, x), x);
    assert_row(p, work, row, final, x);
    if (p.splits > 1) {
      const std::int64_t partial = partial_of(p, work, row, work.split);
      if (column == 0) static_cast<float*>(p.partial_lse)[partial] = final.lse(p.fault);
      if (!C::template kAnyDim<kFastPath> || column < p.v_dim) {
        store_columns(static_cast<float*>(p.partial_out) + partial * p.v_dim, 1, column, p.v_dim, x,
                      kFastPath || p.v_dim % 4 == 0);
      }
    } else {
      if (column == 0 && p.lse != nullptr) store_lse(p, work, row, final.lse(p.fault));
      if (!C::template kAnyDim<kFastPath> || column < p.v_dim) {
        store_output_columns<C, kFastPath>(p, output_offset(p, work, row), column, x);
      }
    }
  }
}

/// Stores the staged output; the last CTA of a work tile combines its splits.
template <typename C, bool kFastPath>
__device__ __forceinline__ void epilogue(SharedStorage<C>& s, const AttentionParams& p) {
  store_output<C, kFastPath>(s.staged, p, s.work);
  if (p.splits > 1 && p.counters != nullptr) {
    SplitThread<C, kFastPath> thread(s, p, s.work);
    core::combine_in_last_cta(thread);
  }
}

/// Not inlined: inlining spills mainloop registers. Both paths share it, because large tiles get
/// here only with split-KV.
template <typename C>
__device__ __noinline__ void epilogue_noinline(SharedStorage<C>& s, const AttentionParams& p) {
  epilogue<C, false>(s, p);
}

/// Epilogue of CTAs that reduce their warps' results in shared memory.
template <typename C, bool kFastPath>
__device__ __forceinline__ void epilogue_cta(SharedStorage<C>& s, const AttentionParams& p,
                                             const AccO<C>& acc_o, const RowStats<C>& row_stats,
                                             const Thread<C>& t) {
  if constexpr (C::kWarpPrivateKv && kHasClusters) {
    if (p.cluster_combine) {
      const ClusterExchange<C> exchange(s, p, s.work);
      stage_output<C>(s, acc_o, row_stats, t);
      const CtaExchangeThread<C, kFastPath> thread{{s, p, s.work}};
      core::combine_from_ctas(thread, exchange.peer_slot, exchange.combined);
      return;
    }
  }
  stage_output<C>(s, acc_o, row_stats, t);
  if constexpr (kFastPath && C::kTileQ <= 32) {
    epilogue<C, true>(s, p);
  } else {
    epilogue_noinline<C>(s, p);
  }
}

}  // namespace flashcore::cuda::sm80
