// The producer: fills the Q, K and V pipelines by TMA (core::produce).
#pragma once

#include "core/seq_info.h"
#include "cuda/primitives/tma.cuh"
#include "cuda/sm90/barriers.cuh"

namespace flashcore::cuda::sm90 {

/// Loads all 128-byte panels of a tile. s_full expects their bytes already.
template <typename Tile>
__device__ __forceinline__ void load_panels(unsigned char* s_tile, const CUtensorMap& map, int row,
                                            int head, int batch, std::uint64_t& s_full) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    tma_load_4d(shared_address(s_tile) + panel * Tile::kPanelBytes, map,
                panel * Tile::kPanelColumns, row, head, batch, s_full);
  }
}

template <typename Tile>
__device__ __forceinline__ void load_tile(unsigned char* s_tile, const CUtensorMap& map, int row,
                                          int head, int batch, std::uint64_t& s_full) {
  arrive_expect_tx(s_full, Tile::kBytes);
  load_panels<Tile>(s_tile, map, row, head, batch, s_full);
}

/// The producer: one thread, or a warp for paged KV. The boxes of a paged KV tile are in different
/// pages, and the lanes share them. All lanes wait, and each load begins with a __syncwarp(): a
/// lane that ran ahead by two phases of a barrier would mistake one parity for the other.
template <typename C, bool kPaged>
struct Producer : RoleWarp<C> {
  using Pipeline = typename C::Pipeline;
  using KvTile = typename C::KeyTile;
  const int lane;

  __device__ __forceinline__ Producer(SharedStorage<C>& s, const Params& params)
      : RoleWarp<C>{s, params}, lane(threadIdx.x) {}

  template <Sm90Barrier kBarrier, typename State>
  __device__ __forceinline__ void arrive(const State& state) const {
    std::uint64_t& barrier = this->s.template barrier<kBarrier>(state.stage());
    if constexpr (kPaged) {
      arrive_once_per_warp(barrier, lane);
    } else {
      cuda::arrive(barrier);
    }
  }

  __device__ __forceinline__ void load_q(TileQueueState queue, typename Pipeline::QStage q_stage,
                                         int group) {
    if constexpr (kPaged) {
      __syncwarp();
      if (lane != 0) return;
    }
    const WorkTile& work = this->work(queue);
    using QTile = typename C::QueryTile;
    const int queries_each = C::kPackGqa ? this->params.heads.queries() : core::kQTileRows;
    std::uint64_t& s_full = this->s.template barrier<Sm90Barrier::q_full>(q_stage.stage());
    arrive_expect_tx(s_full, C::kQTilesPerBarrier * QTile::kBytes);
#pragma unroll
    for (int i = 0; i < C::kQTilesPerBarrier; ++i, ++group) {
      load_panels<QTile>(this->s.q[q_stage.slot() + i], this->params.q,
                         work.seq.q_row + work.first_query + group * queries_each, work.head,
                         work.q_batch, s_full);
    }
  }

  __device__ __forceinline__ void load_k(TileQueueState queue, typename Pipeline::KvState state,
                                         std::int32_t tile) {
    const WorkTile& work = this->work(queue);
    if constexpr (kKeepsPages) {
      v_pages = k_pages;
      k_pages = tile == work.first_tile ? location_of(work, tile, lane) : next_pages;
      k_tile = tile;
    }
    load_kv(this->s.k[state.stage()], this->params.k, work, tile,
            this->s.template barrier<Sm90Barrier::k_full>(state.stage()), k_pages);
    // The page table's latency passes while the producer waits for the next free stage.
    if constexpr (kKeepsPages) next_pages = location_of(work, tile + 1, lane);
  }

  __device__ __forceinline__ void load_v(TileQueueState queue,
                                         typename Pipeline::LoadedVState state, std::int32_t tile) {
    unsigned char* s_tile;
    if constexpr (C::kFp8) {
      s_tile = this->s.v_staging[state.stage()];
    } else {
      s_tile = this->s.v[state.stage()];
    }
    const bool is_last = tile == k_tile;
    load_kv(s_tile, this->params.v, this->work(queue), tile,
            this->s.template barrier<Pipeline::kLoadedVFull>(state.stage()),
            {is_last ? k_pages.block : v_pages.block, is_last ? k_pages.row : v_pages.row});
  }

 private:
  static constexpr bool kKeepsPages =
      kPaged && C::kProducerRegisters >= 40;  // the others would spill
  // Paged KV: locations of the lane's box in the K tile loaded last, in the one before, whose V
  // tile follows, and in the next one.
  core::KvLocation k_pages{}, v_pages{}, next_pages{};
  std::int32_t k_tile = -1;

  __device__ __forceinline__ void load_kv(unsigned char* s_tile, const CUtensorMap& map,
                                          const WorkTile& work, std::int32_t tile,
                                          std::uint64_t& s_full, core::KvLocation pages) const {
    if constexpr (kPaged) {
      __syncwarp();
      load_pages(s_tile, map, work, tile, s_full, pages);
    } else {
      load_tile<KvTile>(s_tile, map, work.seq.k_row + tile * C::kTileK, work.kv_head, work.k_batch,
                        s_full);
    }
  }

  /// Loads the boxes with keys of the sequence; the lanes share them. The rest of the tile keeps
  /// its old content: scores of such keys are masked, and V is zero-filled there (zero_v_tail,
  /// transpose_v).
  __device__ __forceinline__ void load_pages(unsigned char* s_tile, const CUtensorMap& map,
                                             const WorkTile& work, std::int32_t tile,
                                             std::uint64_t& s_full, core::KvLocation first) const {
    const int log2 = this->params.page_box_log2;
    const int boxes = box_count(work, tile);
    const int box_bytes = core::kPanelRowBytes << log2;
    if (lane == 0) arrive_expect_tx(s_full, boxes * box_bytes * KvTile::kPanels);
    __syncwarp();
    core::KvLocation location = first;
#pragma unroll 1
    for (int box = lane; box < boxes; box += 32) {
      if (!kKeepsPages || box >= 32) location = location_of(work, tile, box);
      load_panels<KvTile>(s_tile + box * box_bytes, map, location.row, work.kv_head, location.block,
                          s_full);
    }
  }

  __device__ __forceinline__ int box_count(const WorkTile& work, std::int32_t tile) const {
    const int keys = min(max(work.seq.kv_len - tile * C::kTileK, 0), C::kTileK);
    const int log2 = this->params.page_box_log2;
    return (keys + (1 << log2) - 1) >> log2;
  }

  /// The page of a box, and its row in the page. Boxes past the last key have the location of key
  /// 0.
  __device__ __forceinline__ core::KvLocation location_of(const WorkTile& work, std::int32_t tile,
                                                          int box) const {
    const int key = tile * C::kTileK + (box << this->params.page_box_log2);
    return core::kv_row_map(this->params.call, work.seq, work.b)
        .at(key < work.seq.kv_len ? key : 0);
  }
};

}  // namespace flashcore::cuda::sm90
