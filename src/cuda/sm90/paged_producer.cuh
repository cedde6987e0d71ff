// The producers of paged KV (core::produce). A TMA box has keys of one page only, and a warp issues
// one box at a time: three warps share the boxes of a tile. page_gatherer.cuh has smaller pages.
#pragma once

#include "core/paged_kv.h"
#include "cuda/sm90/producer.cuh"

namespace flashcore::cuda::sm90 {

/// The number of this warp among the producers of paged KV; negative: it is not one. Warp 1
/// schedules, and for fp8 warps 2 and 3 transpose V.
template <typename C>
__device__ __forceinline__ int page_producer_rank() {
  const int warp = warp_uniform(threadIdx.x / 32);
  if (warp == 0) return 0;
  return C::kPageProducers > 1 ? (warp > 1 ? warp - 1 : -1) : -1;
}

/// Base of the producers of paged KV. All lanes wait, and each load has a __syncwarp(): a lane that
/// ran ahead by two phases of a barrier would mistake one parity for the other.
template <typename C>
struct PageLoader : LoadingWarp<C> {
  using Pipeline = typename C::Pipeline;
  static constexpr int kWarps = C::kPageProducers;
  const int lane, rank;

  __device__ __forceinline__ PageLoader(SharedStorage<C>& s, const Params& params, int rank_)
      : LoadingWarp<C>{{s, params}}, lane(threadIdx.x % 32), rank(rank_) {}

  __device__ __forceinline__ bool leads() const { return kWarps == 1 || rank == 0; }

  template <Sm90Barrier kBarrier, typename State>
  __device__ __forceinline__ void arrive(const State& state) const {
    arrive_once_per_warp(this->s.template barrier<kBarrier>(state.stage()), lane);
  }

  __device__ __forceinline__ void load_q(TileQueueState queue, typename Pipeline::QStage q_stage,
                                         int group) {
    __syncwarp();
    if (lane == 0) LoadingWarp<C>::load_q(queue, q_stage, group);
  }

 protected:
  __device__ __forceinline__ core::KvRowMap row_map(const WorkTile& work) const {
    return core::kv_row_map(this->params.call, work.seq, work.b);
  }
  /// The page of a key, before KvRowMap::checked(), and its row in the page. Keys past the last
  /// have the location of key 0.
  __device__ __forceinline__ core::KvLocation find(const WorkTile& work, std::int32_t key) const {
    return row_map(work).find(key < work.seq.kv_len ? key : 0);
  }
};

/// A warp that loads TMA boxes. Lane l of warp w loads the boxes w + kWarps * (l + 32 i).
template <typename C>
struct PagedProducer : PageLoader<C> {
  using Pipeline = typename C::Pipeline;
  using KvTile = typename C::KeyTile;
  using PageLoader<C>::kWarps, PageLoader<C>::lane, PageLoader<C>::rank;
  static constexpr bool kDefersArrivals = false;

  __device__ __forceinline__ PagedProducer(SharedStorage<C>& s, const Params& params, int rank_)
      : PageLoader<C>(s, params, rank_) {}

  __device__ __forceinline__ void load_k(TileQueueState queue, typename Pipeline::KvState state,
                                         std::int32_t tile) {
    const WorkTile& work = this->work(queue);
    if constexpr (kKeepsPages) {
      v_pages = k_pages;
      k_pages = this->row_map(work).checked(
          tile == work.first_tile ? find_box(work, tile, first_box()) : next_pages);
      k_tile = tile;
    }
    load(this->s.k[state.stage()], this->params.k, work, tile,
         this->s.template barrier<Sm90Barrier::k_full>(state.stage()), k_pages);
    // The page table's latency passes while the producer waits for the next free stage.
    if constexpr (kKeepsPages) next_pages = find_box(work, tile + 1, first_box());
  }

  __device__ __forceinline__ void load_v(TileQueueState queue,
                                         typename Pipeline::LoadedVState state, std::int32_t tile) {
    const bool is_last = tile == k_tile;
    load(this->v_tile(state), this->params.v, this->work(queue), tile,
         this->s.template barrier<Pipeline::kLoadedVFull>(state.stage()),
         {is_last ? k_pages.block : v_pages.block, is_last ? k_pages.row : v_pages.row});
  }

 private:
  static constexpr bool kKeepsPages = C::kProducerRegisters >= 40;  // the others would spill
  static constexpr int kStride = 32 * kWarps;                       // boxes of all lanes
  // Locations of the lane's first box in the K tile loaded last, in the one before, whose V tile
  // follows, and in the next one, which is not checked yet.
  core::KvLocation k_pages{}, v_pages{}, next_pages{};
  std::int32_t k_tile = -1;

  __device__ __forceinline__ int first_box() const { return rank + kWarps * lane; }

  /// Loads the warp's boxes with keys of the sequence. The rest of the tile keeps its old content:
  /// scores of such keys are masked, and V is zero-filled there (zero_v_tail, transpose_v).
  __device__ __forceinline__ void load(unsigned char* s_tile, const CUtensorMap& map,
                                       const WorkTile& work, std::int32_t tile,
                                       std::uint64_t& s_full, core::KvLocation first) const {
    __syncwarp();
    const int log2 = this->params.page_box_log2;
    const int boxes = box_count(work, tile);
    const int box_bytes = core::kPanelRowBytes << log2;
    if (lane == 0) {
      const int own_boxes = (boxes - rank + kWarps - 1) / kWarps;  // at least 0
      arrive_expect_tx(s_full, own_boxes * box_bytes * KvTile::kPanels);
    }
    __syncwarp();
    core::KvLocation location = first;
#pragma unroll 1
    for (int box = first_box(); box < boxes; box += kStride) {
      if (!kKeepsPages || box >= kStride) {
        location = this->row_map(work).checked(find_box(work, tile, box));
      }
      load_panels<KvTile>(s_tile + box * box_bytes, map, location.row, work.kv_head, location.block,
                          s_full);
    }
  }

  __device__ __forceinline__ int box_count(const WorkTile& work, std::int32_t tile) const {
    const int keys = min(max(work.seq.kv_len - tile * C::kTileK, 0), C::kTileK);
    const int log2 = this->params.page_box_log2;
    return (keys + (1 << log2) - 1) >> log2;
  }

  __device__ __forceinline__ core::KvLocation find_box(const WorkTile& work, std::int32_t tile,
                                                       int box) const {
    return this->find(work, tile * C::kTileK + (box << this->params.page_box_log2));
  }
};

}  // namespace flashcore::cuda::sm90
