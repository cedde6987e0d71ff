// The producer: fills the Q, K and V pipelines by TMA (core::produce). paged_producer.cuh has that
// of paged KV.
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

/// Base of the producers.
template <typename C>
struct LoadingWarp : RoleWarp<C> {
  using Pipeline = typename C::Pipeline;

  /// Called by one thread.
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

 protected:
  /// The buffer that V is loaded into.
  __device__ __forceinline__ unsigned char* v_tile(typename Pipeline::LoadedVState state) const {
    if constexpr (C::kFp8) {
      return this->s.v_staging[state.stage()];
    } else {
      return this->s.v[state.stage()];
    }
  }
};

/// The producer of dense KV: one thread.
template <typename C>
struct Producer : LoadingWarp<C> {
  using Pipeline = typename C::Pipeline;

  static constexpr bool kDefersArrivals = false;
  static constexpr bool leads() { return true; }

  template <Sm90Barrier kBarrier, typename State>
  __device__ __forceinline__ void arrive(const State& state) const {
    cuda::arrive(this->s.template barrier<kBarrier>(state.stage()));
  }

  __device__ __forceinline__ void load_k(TileQueueState queue, typename Pipeline::KvState state,
                                         std::int32_t tile) {
    load(this->s.k[state.stage()], this->params.k, queue, tile,
         this->s.template barrier<Sm90Barrier::k_full>(state.stage()));
  }
  __device__ __forceinline__ void load_v(TileQueueState queue,
                                         typename Pipeline::LoadedVState state, std::int32_t tile) {
    load(this->v_tile(state), this->params.v, queue, tile,
         this->s.template barrier<Pipeline::kLoadedVFull>(state.stage()));
  }

 private:
  __device__ __forceinline__ void load(unsigned char* s_tile, const CUtensorMap& map,
                                       TileQueueState queue, std::int32_t tile,
                                       std::uint64_t& s_full) const {
    const WorkTile& work = this->work(queue);
    load_tile<typename C::KeyTile>(s_tile, map, work.seq.k_row + tile * C::kTileK, work.kv_head,
                                   work.k_batch, s_full);
  }
};

}  // namespace flashcore::cuda::sm90
