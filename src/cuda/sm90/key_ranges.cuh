// Key ranges of batch-invariant calls (core/key_ranges.h). The ranges of a work tile follow each
// other in one CTA, which keeps the result so far in the workspace, or they are spread over CTAs,
// and the last one to arrive folds all of them. Both fold in the same order, with the same bits.
#pragma once

#include "core/key_ranges.h"
#include "cuda/sm90/tail_split.cuh"

namespace flashcore::cuda::sm90 {

/// A thread's two rows in registers and those of its warp in shared memory.
template <typename C>
struct RangeRows {
  static constexpr int kQuads = WarpPartial<C>::kQuads;
  AccO<C>& acc_o;
  core::SoftmaxState<float>* s_stats;  // [16]: of the warp's rows
  const Thread<C>& t;
  bool any;  // the first row exists; if not, the second does not either

  __device__ __forceinline__ void store(WarpPartial<C>& g_to) const {
    if (any) {
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        g_to.output[i][t.lane] = {acc_o[4 * i], acc_o[4 * i + 1], acc_o[4 * i + 2],
                                  acc_o[4 * i + 3]};
      }
    }
    if (t.lane < 16) g_to.row_stats[t.lane] = s_stats[t.lane];
    __syncwarp();
  }

  __device__ __forceinline__ void load(const WarpPartial<C>& g_from) const {
    __syncwarp();
    if (any) {
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const float4 x = g_from.output[i][t.lane];
        acc_o[4 * i] = x.x, acc_o[4 * i + 1] = x.y, acc_o[4 * i + 2] = x.z, acc_o[4 * i + 3] = x.w;
      }
    }
    if (t.lane < 16) s_stats[t.lane] = g_from.row_stats[t.lane];
    __syncwarp();
  }

  /// Brings the results of ranges 1 to kPrefetched to L1, which has room for few rows: in decode
  /// the last CTA would wait for one after the other.
  __device__ __forceinline__ void prefetch(const Params& params, const WorkTile& work) const {
    constexpr int kPrefetched = 4, kLanesOfLine = 8;
    const unsigned with_rows = __ballot_sync(0xffffffffu, any);
    const int first = t.lane / kLanesOfLine * kLanesOfLine;  // lane at the start of the line
    if (__popc(with_rows) > kLanesOfLine || (with_rows >> first & 1) == 0) return;
#pragma unroll 1
    for (int range = 1; range < min(work.ranges, kPrefetched + 1); ++range) {
      const WarpPartial<C>& g_partial = warp_partial<C>(params, work, range);
#pragma unroll
      for (int i = 0; i < kQuads; i += kLanesOfLine) {
        const float4& g_line = g_partial.output[i + t.lane % kLanesOfLine][first];
        load_global(reinterpret_cast<const std::uint32_t*>(&g_line));
      }
    }
  }

  /// The statistics of a thread's two rows.
  struct ThreadStats {
    core::SoftmaxState<float> of[2];
  };
  __device__ __forceinline__ ThreadStats stats_of(const WarpPartial<C>& g_from) const {
    return {g_from.row_stats[t.lane / 4], g_from.row_stats[t.lane / 4 + 8]};
  }

  /// acc_o and s_stats become those over the keys of both.
  __device__ __forceinline__ void fold(const WarpPartial<C>& g_other,
                                       const ThreadStats& stats) const {
    const int row = t.lane / 4;  // and row + 8
    core::FoldedStats folded[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      folded[half] = core::fold(s_stats[row + 8 * half], stats.of[half]);
    }
    if (any) {
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const float4 x = g_other.output[i][t.lane];
        const float other[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int reg = 0; reg < 4; ++reg) {
          const float(&weight)[2] = folded[reg / 2].weight;
          acc_o[4 * i + reg] =
              core::weighted_sum(acc_o[4 * i + reg], weight[0], other[reg], weight[1]);
        }
      }
    }
    __syncwarp();
    if (t.lane % 4 == 0) {
      s_stats[row] = folded[0].state;
      s_stats[row + 8] = folded[1].state;
    }
    __syncwarp();
  }
};

/// Takes the warp's result of a range of the tile. True if acc_o and s.final_stats then cover all
/// keys.
template <typename C>
__device__ __forceinline__ bool fold_ranges(AccO<C>& acc_o, SharedStorage<C>& s,
                                            const Params& params, const WorkTile& work,
                                            const Thread<C>& t) {
  const RangeRows<C> rows{acc_o, s.final_stats + 16 * consumer_warp(), t, has_row(work, t, 0)};
  if (!__any_sync(0xffffffffu, rows.any)) return false;  // nothing to store
  if (!params.ranges_apart) {
    constexpr int kWarps = 4 * C::kConsumers;
    auto& g_so_far = static_cast<WarpPartial<C>*>(
        params.tail_partials)[static_cast<int>(blockIdx.x) * kWarps + consumer_warp()];
    if (work.tail_split > 0) rows.fold(g_so_far, rows.stats_of(g_so_far));
    if (work.tail_split == work.ranges - 1) return true;
    rows.store(g_so_far);
    return false;
  }
  rows.store(warp_partial<C>(params, work, work.tail_split));
  std::uint32_t before = 0;
  if (t.lane == 0) {
    const int counter = work.tail_index * 4 * C::kConsumers + consumer_warp();
    before = atomic_inc_acq_rel(params.tail_arrivals + counter, work.ranges - 1);
  }
  if (__shfl_sync(0xffffffffu, before, 0) != work.ranges - 1u) return false;
  rows.prefetch(params, work);
  // The statistics of the next range arrive together with the output of this one.
  auto next = rows.stats_of(warp_partial<C>(params, work, min(1, work.ranges - 1)));
  rows.load(warp_partial<C>(params, work, 0));
#pragma unroll 1
  for (int range = 1; range < work.ranges; ++range) {
    const auto stats = next;
    next = rows.stats_of(warp_partial<C>(params, work, min(range + 1, work.ranges - 1)));
    rows.fold(warp_partial<C>(params, work, range), stats);
  }
  return true;
}

}  // namespace flashcore::cuda::sm90
