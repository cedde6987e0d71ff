// One work tile: prologue, mainloop and epilogue.
#pragma once

#include "cuda/primitives/pdl.cuh"
#include "cuda/primitives/report.cuh"
#include "cuda/sm80/load_kv8.cuh"
#include "cuda/sm80/mainloop.cuh"
#include "cuda/sm80/mainloop_swap_ab.cuh"

namespace flashcore::cuda::sm80 {

/// Mask rows and ALiBi slopes of the tile's rows, for the steps.
template <typename C, bool kFastPath>
__device__ __forceinline__ void store_row_constants(SharedStorage<C>& s, const AttentionParams& p,
                                                    const WorkTile& work) {
  static_assert(C::kTileQ <= C::kThreads);
  if constexpr (C::template kReadsMask<kFastPath>) {
    const bool has_slopes = !kFastPath && p.alibi_slopes != nullptr;
    if ((!p.has_mask() && !has_slopes) || threadIdx.x >= C::kTileQ) return;
    const Row row = row_of(p, work, min(static_cast<int>(threadIdx.x), work.rows - 1));
    if (p.has_mask()) s.mask_rows[threadIdx.x] = mask_row_of<C>(p, work, row);
    if (has_slopes) {
      s.slopes[threadIdx.x] = core::ScoreRow<float>{p, work.b, row.head, row.query}.slope();
    }
  }
}

template <typename C, bool kFastPath>
__device__ __forceinline__ void process_tile(SharedStorage<C>& s, const AttentionParams& p) {
  if (p.is_varlen || (C::kLargeTile && p.packed_mask != nullptr)) pdl_wait();
  // Every thread decodes the tile for its first loads; later it reads thread 0's copy.
  const WorkTile work = decode_work_tile<C, kFastPath>(p, blockIdx.x);
  if (p.is_varlen && threadIdx.x == 0) report(p, work.seq.error);
  if (!core::has_split(work.rows, work.split, work.splits)) {
    pdl_wait();
    if (work.rows > 0) store_empty_partials(p, work);
    return;
  }
  const std::int32_t begin = core::tile_begin(work.visible.begin, C::kTileK);
  copy_k<C, kFastPath>(s, p, work, 0, begin, PdlWait());
  if constexpr (!C::kKv8) load_q<C, kFastPath>(s, p, work);
  cp_async_commit();
  load_v<C, kFastPath>(s, p, work, 0, begin);
#pragma unroll 1
  for (int stage = 1; stage < C::kStages; ++stage) {
    load_k<C, kFastPath>(s, p, work, stage, begin + stage * C::kTileK);
    load_v<C, kFastPath>(s, p, work, stage, begin + stage * C::kTileK);
  }
  if constexpr (C::kKv8) {  // overlaps the copies
    const TileScales scales = load_tile_scales<C>(p, work);
    load_paired_q<C, kFastPath>(s, p, work, scales.row);
    store_scales<C>(s, scales, p, work);
  }
  if (threadIdx.x == 0) {
    s.work = work;
    if constexpr (C::template kHasPlainSteps<kFastPath>) s.plain_end = plain_end<C>(p, work);
  }
  if (work.split == 0 && work.kv_head == 0 && work.first_row == 0) {
    report_pages(p, work.seq, work.b, threadIdx.x, C::kThreads);
  }
  if (C::kWarpsM == 1) {
    if (threadIdx.x == 0) s.warp_keys[0] = {work.visible, work.fully_visible};
  } else if (threadIdx.x < C::kWarpsM) {
    const int first = threadIdx.x * C::kWarpRows;
    s.warp_keys[threadIdx.x] =
        first < work.rows ? keys_of_rows(p, work, first, min(first + C::kWarpRows, work.rows) - 1)
                          : WarpKeys{};
  }
  store_row_constants<C, kFastPath>(s, p, work);
  __syncthreads();
  if constexpr (C::kWarpPrivateKv && kHasClusters) {
    if (p.cluster_combine) {
      const ClusterThread<C> thread{s, p, work};
      core::open_buffer(thread, combines_from_warps<C>(p, work));
    }
  }
  if constexpr (C::kSwapAB) {
    mainloop_swap_ab<C, kFastPath>(s, p, begin);
  } else {
    mainloop<C, kFastPath>(s, p, begin);
  }
}

}  // namespace flashcore::cuda::sm80
