// The producer warp: fills the Q, K and V pipelines by TMA (core::produce).
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

/// The producer warp. Lane 0 loads dense tiles. The boxes of paged KV tiles are in different pages:
/// the lanes share them. All lanes wait, and each load begins with a __syncwarp(): a lane that ran
/// ahead by two phases of a barrier would mistake one parity for the other.
template <typename C>
struct ProducerWarp : RoleWarp<C> {
  using Pipeline = typename C::Pipeline;
  using KvTile = typename C::KeyTile;
  int lane;

  template <Sm90Barrier kBarrier, typename State>
  __device__ __forceinline__ void arrive(const State& state) const {
    arrive_once_per_warp(this->s.template barrier<kBarrier>(state.stage()), lane);
  }

  __device__ __forceinline__ void load_q(TileQueueState queue, typename Pipeline::QStage q_stage,
                                         int group) {
    __syncwarp();
    if (lane != 0) return;
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
    load_kv(this->s.k[state.stage()], this->params.k, this->work(queue), tile,
            this->s.template barrier<Sm90Barrier::k_full>(state.stage()));
  }

  __device__ __forceinline__ void load_v(TileQueueState queue,
                                         typename Pipeline::LoadedVState state, std::int32_t tile) {
    unsigned char* s_tile;
    if constexpr (C::kFp8) {
      s_tile = this->s.v_staging[state.stage()];
    } else {
      s_tile = this->s.v[state.stage()];
    }
    load_kv(s_tile, this->params.v, this->work(queue), tile,
            this->s.template barrier<Pipeline::kLoadedVFull>(state.stage()));
  }

 private:
  __device__ __forceinline__ void load_kv(unsigned char* s_tile, const CUtensorMap& map,
                                          const WorkTile& work, std::int32_t tile,
                                          std::uint64_t& s_full) const {
    __syncwarp();
    const std::int32_t first_key = tile * C::kTileK;
    if (this->params.call.pages.table != nullptr) {
      load_pages(s_tile, map, work, first_key, s_full);
    } else if (lane == 0) {
      load_tile<KvTile>(s_tile, map, work.seq.k_row + first_key, work.kv_head, work.k_batch,
                        s_full);
    }
  }

  /// Loads the boxes with keys of the sequence. The rest of the tile keeps its old content: scores
  /// of such keys are masked, and V is zero-filled there (zero_v_tail, transpose_v). The lanes look
  /// up pages side by side. One lane issues all boxes: lanes that issue in turn take three times as
  /// long, but need fewer registers.
  __device__ __forceinline__ void load_pages(unsigned char* s_tile, const CUtensorMap& map,
                                             const WorkTile& work, std::int32_t first_key,
                                             std::uint64_t& s_full) const {
    const int log2 = this->params.page_box_log2;
    const int keys = min(max(work.seq.kv_len - first_key, 0), C::kTileK);
    const int boxes = (keys + (1 << log2) - 1) >> log2;
    const int box_bytes = core::kPanelRowBytes << log2;
    if (lane == 0) arrive_expect_tx(s_full, boxes * box_bytes * KvTile::kPanels);
    __syncwarp();
    const auto location_of = [&](int box) {
      return core::kv_row_map(this->params.call, work.seq, work.b).at(first_key + (box << log2));
    };
    const auto load_box = [&](int box, int row, int block) {
      load_panels<KvTile>(s_tile + box * box_bytes, map, row, work.kv_head, block, s_full);
    };
    if constexpr (C::kFp8) {
#pragma unroll 1
      for (int box = lane; box < boxes; box += 32) {
        const core::KvLocation location = location_of(box);
        load_box(box, location.row, location.block);
      }
    } else {
      core::KvLocation own{};  // of the lane's box among 32
#pragma unroll 1
      for (int box = 0; box < boxes; ++box) {
        if (box % 32 == 0) own = location_of(min(box + lane, boxes - 1));
        const int row = __shfl_sync(0xffffffffu, own.row, box % 32);
        const int block = __shfl_sync(0xffffffffu, own.block, box % 32);
        if (lane == 0) load_box(box, row, block);
      }
    }
  }
};

}  // namespace flashcore::cuda::sm90
