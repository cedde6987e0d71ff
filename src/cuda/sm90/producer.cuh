// The producer thread: fills the Q, K and V pipelines by TMA (core::produce).
#pragma once

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

template <typename C>
struct ProducerThread : RoleThread<C> {
  using Pipeline = typename C::Pipeline;

  __device__ __forceinline__ void load_q(TileQueueState queue, typename Pipeline::QStage q_stage,
                                         int group) {
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
    load_tile<typename C::KeyTile>(this->s.k[state.stage()], this->params.k,
                                   work.seq.k_row + tile * C::kTileK, work.kv_head, work.k_batch,
                                   this->s.template barrier<Sm90Barrier::k_full>(state.stage()));
  }

  __device__ __forceinline__ void load_v(TileQueueState queue,
                                         typename Pipeline::LoadedVState state, std::int32_t tile) {
    const WorkTile& work = this->work(queue);
    unsigned char* s_tile;
    if constexpr (C::kFp8) {
      s_tile = this->s.v_staging[state.stage()];
    } else {
      s_tile = this->s.v[state.stage()];
    }
    load_tile<typename C::KeyTile>(s_tile, this->params.v, work.seq.k_row + tile * C::kTileK,
                                   work.kv_head, work.k_batch,
                                   this->s.template barrier<Pipeline::kLoadedVFull>(state.stage()));
  }
};

}  // namespace flashcore::cuda::sm90
