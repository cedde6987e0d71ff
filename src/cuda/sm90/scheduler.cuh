// The scheduler thread: fetches work tiles in the order of core::TileScheduler and decodes them
// into the tile queue (core::schedule_tiles).
#pragma once

#include "core/key_ranges.h"
#include "core/score.h"
#include "cuda/primitives/report.cuh"
#include "cuda/sm90/barriers.cuh"
#include "cuda/sm90/score.cuh"

namespace flashcore::cuda::sm90 {

/// fp8: the scales that all rows and keys of a work tile share.
template <typename C>
__device__ __forceinline__ void find_scales(SharedStorage<C>& s, const AttentionParams& p,
                                            int stage) {
  const WorkTile& work = s.work_tiles[stage];
  const auto of_head = [&](const core::Scales& scales, int head) {
    return scales.is_per_block() ? 1.f : scales.at(work.b, head, 0);
  };
  s.score_scale[stage] = core::score_scale<float>(p) * of_head(p.q_scale, work.head) *
                         of_head(p.k_scale, work.kv_head);
  s.output_scale[stage] = of_head(p.v_scale, work.kv_head);
}

template <typename C>
struct SchedulerThread : RoleThread<C> {
  // Key ranges that are not apart: the tile, its next range and how many it has.
  std::int32_t tile_index = 0, next_range = 0, ranges = 0;

  __device__ __forceinline__ std::int32_t first_index() const { return blockIdx.x; }
  __device__ __forceinline__ std::int32_t num_scheduled() const {
    return this->params.num_scheduled;
  }

  /// Dynamic persistent scheduling. The counter wraps to 0 with the last fetch. Key ranges that are
  /// not apart: the tile again until its last range.
  __device__ __forceinline__ std::int32_t fetch_tile() {
    if constexpr (C::kKeyRanges) {
      if (++next_range < ranges) return tile_index;
      next_range = 0;
    }
    const auto ctas = static_cast<std::int32_t>(gridDim.x);
    if (num_scheduled() <= ctas) return num_scheduled();
    return ctas +
           static_cast<std::int32_t>(atomicInc(this->params.tile_counter, num_scheduled() - 1));
  }

  /// Writes the tile straight to shared memory, field by field: the thread has few registers. False
  /// if the tile has no query, or fewer key ranges.
  __device__ __forceinline__ bool decode_work_tile(TileQueueState queue, std::int32_t index) {
    WorkTile& s_work = this->work(queue);
    const Params& params = this->params;
    const AttentionParams& p = params.call;
    const core::ScheduledTile scheduled =
        C::kPackGqa ? core::scheduled_tile(params.tail, index) : core::ScheduledTile{index, -1};
    const core::TileCoord coord = core::coord_of(params.order, scheduled.tile);
    if constexpr (C::kPackGqa) {
      s_work.tail_split = scheduled.split;
      s_work.tail_index = scheduled.tile - params.tail.first;
    }
    const core::PackGqa heads = C::kPackGqa ? params.heads : core::PackGqa{};
    s_work.b = coord.batch;
    s_work.head = coord.head << heads.log2;
    s_work.first_query = coord.q_tile * (C::kTileQ >> heads.log2);
    s_work.q_batch = p.cu_seqlens_q != nullptr ? 0 : coord.batch;
    s_work.k_batch = p.cu_seqlens_k != nullptr ? 0 : coord.batch;
    s_work.kv_head = core::kv_head_of(p, s_work.head);
    if (p.alibi_slopes != nullptr) {
#pragma unroll 1
      for (int i = 0; i < (C::kPackGqa ? 1 << heads.log2 : 1); ++i) {
        s_work.alibi_slopes[i] = core::ScoreRow<float>{p, coord.batch, s_work.head + i, 0}.slope();
      }
    }
    s_work.seq = p.is_varlen ? core::seq_info_of(p, coord.batch) : core::dense_seq_info(p);
    if (p.is_varlen) report(p, s_work.seq.error);
    if (coord.head == 0 && coord.q_tile == 0) report_pages(p, s_work.seq, coord.batch, 0, 1);
    asm volatile("" ::: "memory");
    const std::int32_t first = s_work.first_query;
    if (params.tiles_from_window) {
      core::drop_first_keys(s_work.seq, core::visible_keys(s_work.seq.mask, first).begin);
    }
    s_work.queries = min(C::kTileQ >> heads.log2, s_work.seq.q_len - first);
    s_work.edges = core::mask_edges(s_work.seq.mask, first);
    const core::TailRange range = C::kPackGqa && !C::kKeyRanges
                                      ? core::TailRange{s_work.tail_split, params.tail.kv_tiles}
                                      : core::TailRange{};
    core::KeyRange limit = core::kAllKeys;
    if constexpr (C::kKeyRanges) {
      if (!find_range(s_work, index, limit)) return false;
    }
    if constexpr (C::kTakesMask) {
      if (params.mask.words != nullptr && s_work.queries > 0) {
        limit = core::visible_blocks(params.mask, s_work.b, s_work.head, first, s_work.queries);
      }
    }
    core::find_kv_tiles(s_work, s_work.seq.mask, first, heads.queries(), range, C::kConsumers,
                        C::kTileK, limit);
    if constexpr (C::kFp8) find_scales<C>(this->s, p, queue.stage());
    return s_work.queries > 0;
  }

  __device__ __forceinline__ void mark_end(TileQueueState queue) const {
    this->work(queue).queries = -1;
  }

 private:
  /// Finds the keys of the tile's next range, or of the one that `index` stands for. False if the
  /// tile does not have it.
  __device__ __forceinline__ bool find_range(WorkTile& s_work, std::int32_t index,
                                             core::KeyRange& limit) {
    const Params& params = this->params;
    const core::Mask& mask = s_work.seq.mask;
    const std::int32_t first = s_work.first_query, last = first + max(s_work.queries, 1) - 1;
    const core::KeyRanges found =
        core::ranges_of({core::visible_keys(mask, first).begin, core::visible_keys(mask, last).end},
                        params.keys_per_range);
    if (!params.ranges_apart) {
      tile_index = index;
      ranges = s_work.queries > 0 ? found.count : 0;
      s_work.tail_split = next_range;
    }
    s_work.ranges = found.count;
    limit = core::keys_of_range(found.first + s_work.tail_split, params.keys_per_range);
    return s_work.tail_split < found.count;
  }
};

}  // namespace flashcore::cuda::sm90
