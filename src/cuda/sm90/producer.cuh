// The two threads that do not compute: the scheduler and the producer (core/sm90_roles.h).
#pragma once

#include "cuda/primitives/hopper.cuh"
#include "cuda/primitives/report.cuh"
#include "cuda/sm90/config.cuh"
#include "cuda/sm90/score.cuh"

namespace flashcore::cuda::sm90 {

/// The factors that all rows and keys of an item have in common.
template <typename C>
__device__ __forceinline__ void describe_scales(SharedStorage<C>& s, const AttentionParams& p,
                                                int stage) {
  const Item& item = s.items[stage];
  const auto of_head = [&](const core::Scales& scales, int head) {
    return scales.by_rows() ? 1.f : scales.at(item.b, head, 0);
  };
  s.score_factor[stage] =
      score_factor(p) * of_head(p.q_scale, item.head) * of_head(p.k_scale, item.kv_head);
  s.output_factor[stage] = of_head(p.v_scale, item.kv_head);
}

/// Fetches items, in the order of core::WorkOrder.
template <typename C>
struct SchedulerThread : RoleThread<C> {
  __device__ __forceinline__ std::int32_t first_piece() const { return blockIdx.x; }
  __device__ __forceinline__ std::int32_t pieces() const { return this->params.pieces; }

  /// Pieces are dealt out as CTAs ask for them; the last to ask leaves the ticket at 0.
  __device__ __forceinline__ std::int32_t next_piece() const {
    const auto blocks = static_cast<std::int32_t>(gridDim.x);
    if (pieces() <= blocks) return pieces();
    return blocks + static_cast<std::int32_t>(atomicInc(this->params.ticket, pieces() - 1));
  }

  /// Written where it is needed, piece by piece: the thread has few registers. Returns whether
  /// there is something to do.
  __device__ __forceinline__ bool describe(ItemPlace place, std::int32_t index) const {
    Item& s_item = this->item(place);
    const Params& params = this->params;
    const AttentionParams& p = params.call;
    const core::WorkPiece piece =
        C::kSpread ? core::work_piece(params.tail, index) : core::WorkPiece{index, -1};
    const core::WorkItem work = core::work_item(params.order, piece.item);
    if constexpr (C::kSpread) {
      s_item.part = piece.part;
      s_item.cut_item = piece.item - params.tail.first;
    }
    const core::HeadsInTile heads = C::kSpread ? params.heads : core::HeadsInTile{};
    s_item.b = work.batch;
    s_item.head = work.head << heads.log2;
    s_item.first_query = work.q_tile * (C::kTileQ >> heads.log2);
    s_item.q_batch = p.cu_seqlens_q != nullptr ? 0 : work.batch;
    s_item.k_batch = p.cu_seqlens_k != nullptr ? 0 : work.batch;
    s_item.kv_head = core::kv_head_of(p, s_item.head);
    s_item.sequence = p.has_lengths ? core::sequence_of(p, work.batch) : core::whole_sequence(p);
    if (p.has_lengths) report(p, s_item.sequence.error);
    asm volatile("" ::: "memory");
    const std::int32_t first = s_item.first_query;
    s_item.queries = min(C::kTileQ >> heads.log2, s_item.sequence.q_len - first);
    s_item.edges = core::mask_edges(s_item.sequence.mask, first);
    const core::ItemPart part =
        C::kSpread ? core::ItemPart{s_item.part, params.tail.part_tiles} : core::ItemPart{};
    core::describe_steps(s_item, s_item.sequence.mask, first, heads.queries(), part, C::kConsumers,
                         C::kTileK);
    if constexpr (C::kCodes) describe_scales<C>(this->s, p, place.stage());
    return s_item.queries > 0;
  }

  __device__ __forceinline__ void describe_end(ItemPlace place) const {
    this->item(place).queries = -1;
  }
};

/// Of a tile whose bytes s_full expects.
template <typename Tile>
__device__ __forceinline__ void copy_panels(unsigned char* s_tile, const CUtensorMap& map, int row,
                                            int head, int batch, std::uint64_t& s_full) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    copy_box(shared_address(s_tile) + panel * Tile::kPanelBytes, map, panel * Tile::kPanelColumns,
             row, head, batch, s_full);
  }
}

template <typename Tile>
__device__ __forceinline__ void copy_tile(unsigned char* s_tile, const CUtensorMap& map, int row,
                                          int head, int batch, std::uint64_t& s_full) {
  arrive_expecting(s_full, Tile::kBytes);
  copy_panels<Tile>(s_tile, map, row, head, batch, s_full);
}

/// Fills the rings by TMA.
template <typename C>
struct ProducerThread : RoleThread<C> {
  using Pipeline = typename C::Pipeline;
  __device__ __forceinline__ void copy_queries(ItemPlace item_place,
                                               typename Pipeline::QueryPlace place, int group) {
    const Item& item = this->item(item_place);
    using Piece = typename C::QueryTile;
    const int queries_each = C::kSpread ? this->params.heads.queries() : core::kQueryPieceRows;
    std::uint64_t& s_full = this->s.template barrier<Sm90Barrier::q_full>(place.stage());
    arrive_expecting(s_full, C::kQueriesTogether * Piece::kBytes);
#pragma unroll
    for (int i = 0; i < C::kQueriesTogether; ++i, ++group) {
      copy_panels<Piece>(this->s.q[place.place() + i], this->params.q,
                         item.sequence.q_row + item.first_query + group * queries_each, item.head,
                         item.q_batch, s_full);
    }
  }

  __device__ __forceinline__ void copy_keys(ItemPlace item_place, typename Pipeline::KvPlace place,
                                            std::int32_t tile) {
    const Item& item = this->item(item_place);
    copy_tile<typename C::KeyTile>(
        this->s.k[place.stage()], this->params.k, item.sequence.k_row + tile * C::kTileK,
        item.kv_head, item.k_batch, this->s.template barrier<Sm90Barrier::k_full>(place.stage()));
  }

  __device__ __forceinline__ void copy_values(ItemPlace item_place,
                                              typename Pipeline::RawPlace place,
                                              std::int32_t tile) {
    const Item& item = this->item(item_place);
    unsigned char* s_tile;
    if constexpr (C::kCodes) {
      s_tile = this->s.raw_v[place.stage()];
    } else {
      s_tile = this->s.v[place.stage()];
    }
    copy_tile<typename C::KeyTile>(s_tile, this->params.v, item.sequence.k_row + tile * C::kTileK,
                                   item.kv_head, item.k_batch,
                                   this->s.template barrier<Pipeline::kLoadedFull>(place.stage()));
  }
};

}  // namespace flashcore::cuda::sm90
