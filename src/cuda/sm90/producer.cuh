// The two threads that do not compute: the scheduler and the producer (core/sm90_roles.h).
#pragma once

#include "cuda/primitives/hopper.cuh"
#include "cuda/primitives/report.cuh"
#include "cuda/sm90/config.cuh"
#include "cuda/sm90/score.cuh"

namespace flashcore::cuda::sm90 {

/// The factors that all rows and keys of an item have in common.
template <typename C>
__device__ __forceinline__ void find_scales(SharedStorage<C>& s, const AttentionParams& p,
                                            int stage) {
  const WorkTile& item = s.items[stage];
  const auto of_head = [&](const core::Scales& scales, int head) {
    return scales.is_per_block() ? 1.f : scales.at(item.b, head, 0);
  };
  s.score_scale[stage] =
      score_scale(p) * of_head(p.q_scale, item.head) * of_head(p.k_scale, item.kv_head);
  s.output_factor[stage] = of_head(p.v_scale, item.kv_head);
}

/// Fetches items, in the order of core::TileScheduler.
template <typename C>
struct SchedulerThread : RoleThread<C> {
  __device__ __forceinline__ std::int32_t first_piece() const { return blockIdx.x; }
  __device__ __forceinline__ std::int32_t pieces() const { return this->params.pieces; }

  /// Pieces are dealt out as CTAs ask for them; the last to ask leaves the tile_counter at 0.
  __device__ __forceinline__ std::int32_t next_piece() const {
    const auto blocks = static_cast<std::int32_t>(gridDim.x);
    if (pieces() <= blocks) return pieces();
    return blocks + static_cast<std::int32_t>(atomicInc(this->params.tile_counter, pieces() - 1));
  }

  /// Written where it is needed, piece by piece: the thread has few registers. Returns whether
  /// there is something to do.
  __device__ __forceinline__ bool describe(TileQueueState place, std::int32_t index) const {
    WorkTile& s_item = this->item(place);
    const Params& params = this->params;
    const AttentionParams& p = params.call;
    const core::ScheduledTile piece =
        C::kPackGqa ? core::scheduled_tile(params.tail, index) : core::ScheduledTile{index, -1};
    const core::TileCoord work = core::coord_of(params.order, piece.item);
    if constexpr (C::kPackGqa) {
      s_item.part = piece.part;
      s_item.cut_item = piece.item - params.tail.first;
    }
    const core::PackGqa heads = C::kPackGqa ? params.heads : core::PackGqa{};
    s_item.b = work.batch;
    s_item.head = work.head << heads.log2;
    s_item.first_query = work.q_tile * (C::kTileQ >> heads.log2);
    s_item.q_batch = p.cu_seqlens_q != nullptr ? 0 : work.batch;
    s_item.k_batch = p.cu_seqlens_k != nullptr ? 0 : work.batch;
    s_item.kv_head = core::kv_head_of(p, s_item.head);
    s_item.seq = p.is_varlen ? core::seq_info_of(p, work.batch) : core::dense_seq_info(p);
    if (p.is_varlen) report(p, s_item.seq.error);
    asm volatile("" ::: "memory");
    const std::int32_t first = s_item.first_query;
    s_item.queries = min(C::kTileQ >> heads.log2, s_item.seq.q_len - first);
    s_item.edges = core::mask_edges(s_item.seq.mask, first);
    const core::TailPart part =
        C::kPackGqa ? core::TailPart{s_item.part, params.tail.part_tiles} : core::TailPart{};
    core::find_kv_tiles(s_item, s_item.seq.mask, first, heads.queries(), part, C::kConsumers,
                        C::kTileK);
    if constexpr (C::kFp8) find_scales<C>(this->s, p, place.stage());
    return s_item.queries > 0;
  }

  __device__ __forceinline__ void mark_end(TileQueueState place) const {
    this->item(place).queries = -1;
  }
};

/// Of a tile whose bytes s_full expects.
template <typename Tile>
__device__ __forceinline__ void copy_panels(unsigned char* s_tile, const CUtensorMap& map, int row,
                                            int head, int batch, std::uint64_t& s_full) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    tma_load_4d(shared_address(s_tile) + panel * Tile::kPanelBytes, map,
                panel * Tile::kPanelColumns, row, head, batch, s_full);
  }
}

template <typename Tile>
__device__ __forceinline__ void copy_tile(unsigned char* s_tile, const CUtensorMap& map, int row,
                                          int head, int batch, std::uint64_t& s_full) {
  arrive_expect_tx(s_full, Tile::kBytes);
  copy_panels<Tile>(s_tile, map, row, head, batch, s_full);
}

/// Fills the rings by TMA.
template <typename C>
struct ProducerThread : RoleThread<C> {
  using Pipeline = typename C::Pipeline;
  __device__ __forceinline__ void copy_queries(TileQueueState item_place,
                                               typename Pipeline::QStage place, int group) {
    const WorkTile& item = this->item(item_place);
    using Piece = typename C::QueryTile;
    const int queries_each = C::kPackGqa ? this->params.heads.queries() : core::kQTileRows;
    std::uint64_t& s_full = this->s.template barrier<Sm90Barrier::q_full>(place.stage());
    arrive_expect_tx(s_full, C::kQTilesPerBarrier * Piece::kBytes);
#pragma unroll
    for (int i = 0; i < C::kQTilesPerBarrier; ++i, ++group) {
      copy_panels<Piece>(this->s.q[place.place() + i], this->params.q,
                         item.seq.q_row + item.first_query + group * queries_each, item.head,
                         item.q_batch, s_full);
    }
  }

  __device__ __forceinline__ void copy_keys(TileQueueState item_place,
                                            typename Pipeline::KvState place, std::int32_t tile) {
    const WorkTile& item = this->item(item_place);
    copy_tile<typename C::KeyTile>(this->s.k[place.stage()], this->params.k,
                                   item.seq.k_row + tile * C::kTileK, item.kv_head, item.k_batch,
                                   this->s.template barrier<Sm90Barrier::k_full>(place.stage()));
  }

  __device__ __forceinline__ void copy_values(TileQueueState item_place,
                                              typename Pipeline::LoadedVState place,
                                              std::int32_t tile) {
    const WorkTile& item = this->item(item_place);
    unsigned char* s_tile;
    if constexpr (C::kFp8) {
      s_tile = this->s.v_staging[place.stage()];
    } else {
      s_tile = this->s.v[place.stage()];
    }
    copy_tile<typename C::KeyTile>(s_tile, this->params.v, item.seq.k_row + tile * C::kTileK,
                                   item.kv_head, item.k_batch,
                                   this->s.template barrier<Pipeline::kLoadedFull>(place.stage()));
  }
};

}  // namespace flashcore::cuda::sm90
