// The warpgroup that feeds the consumers of gradients: the scheduler thread, the producer thread
// and the tail warp (core/sm90_bwd_roles.h).
#pragma once

#include "core/score.h"
#include "cuda/primitives/report.cuh"
#include "cuda/sm90/bwd_rows.cuh"
#include "cuda/sm90/producer.cuh"

namespace flashcore::cuda::sm90 {

// ---------------------------------------------------------------------------------------------
// Scheduler

template <typename C>
struct BwdSchedulerThread : BwdRoleThread<C> {
  __device__ __forceinline__ std::int32_t first_index() const { return blockIdx.x; }
  __device__ __forceinline__ std::int32_t num_scheduled() const {
    return this->params.num_scheduled;
  }
  /// Dynamic persistent scheduling. The counter wraps to 0 with the last fetch.
  __device__ __forceinline__ std::int32_t fetch_tile() const {
    const auto ctas = static_cast<std::int32_t>(gridDim.x);
    if (num_scheduled() <= ctas) return num_scheduled();
    return ctas +
           static_cast<std::int32_t>(atomicInc(this->params.tile_counter, num_scheduled() - 1));
  }

  /// Writes the tile straight to shared memory: the thread has few registers. False if it has no
  /// row to compute or to write.
  __device__ __forceinline__ bool decode_work_tile(BwdQueueState queue, std::int32_t index) const {
    BwdWorkTile& s_work = this->work(queue);
    const std::int32_t dkdv_tiles = this->params.dkdv_order.tiles;
    const std::int32_t dq_tiles = this->params.dq_order.tiles;
    if constexpr (C::kShape.splits_dkdv()) {
      if (index < dq_tiles) {
        return decode_dq(s_work, core::coord_of(this->params.dq_order, index));
      }
      index -= dq_tiles;
      const bool dk = index < dkdv_tiles;
      s_work.output = dk ? BackwardOutput::dk : BackwardOutput::dv;
      return decode_keys(s_work, dk ? this->params.dkdv_order : this->params.dv_order,
                         dk ? index : index - dkdv_tiles);
    } else {
      if (index < dkdv_tiles) {
        s_work.output = BackwardOutput::dkdv;
        return decode_keys(s_work, this->params.dkdv_order, index);
      }
      return decode_dq(s_work, core::coord_of(this->params.dq_order, index - dkdv_tiles));
    }
  }
  __device__ __forceinline__ void mark_end(BwdQueueState queue) const {
    this->work(queue).output = core::kBwdQueueEnd;
  }

 protected:
  __device__ __forceinline__ void select_sequence(BwdWorkTile& s_work,
                                                  const core::TileCoord& coord) const {
    const AttentionParams& f = this->params.call.fwd;
    s_work.b = coord.batch;
    s_work.head = coord.head;
    s_work.seq = f.is_varlen ? core::seq_info_of(f, coord.batch) : core::dense_seq_info(f);
    if (f.is_varlen) report(f, s_work.seq.error);
    if (this->has_fault(InjectedFault::bwd_mask_ignored)) {
      s_work.seq.mask.left = s_work.seq.mask.right = -1;
    }
  }

  /// A tile of keys. They ascend: with a causal mask the longest come first.
  __device__ __forceinline__ bool decode_keys(BwdWorkTile& s_work, const core::TileScheduler& order,
                                              std::int32_t index) const {
    const core::BackwardParams& p = this->params.call;
    const core::TileCoord coord = core::coord_of(order, index);
    select_sequence(s_work, coord);
    const core::SeqInfo& seq = s_work.seq;
    const std::int32_t first = (order.q_tiles - 1 - coord.q_tile) * core::kBwdTileRows;
    s_work.first_row = first;
    s_work.rows = min(core::kBwdTileRows, seq.kv_len - first);
    s_work.first_head = coord.head * p.group;
    s_work.heads = p.group;
    if (this->has_fault(InjectedFault::group_last_head_only) && p.group > 0) {
      s_work.first_head += p.group - 1;
      s_work.heads = 1;
    }
    s_work.a_row = seq.k_row + first;
    s_work.b_row = seq.q_row;
    s_work.a_batch = p.fwd.cu_seqlens_k != nullptr ? 0 : coord.batch;
    s_work.b_batch = p.fwd.cu_seqlens_q != nullptr ? 0 : coord.batch;
    const bool drops = this->has_fault(InjectedFault::last_query_tile_dropped);
    const std::int32_t q_len = drops ? max(seq.q_len - kStepQueries, 0) : seq.q_len;
    find_tiles(s_work, core::transposed(seq.mask, q_len), kStepQueries);
    // Rows past the last key of a dense sequence are written too.
    return p.fwd.cu_seqlens_k == nullptr || s_work.rows > 0;
  }

  __device__ __forceinline__ bool decode_dq(BwdWorkTile& s_work,
                                            const core::TileCoord& coord) const {
    const core::BackwardParams& p = this->params.call;
    select_sequence(s_work, coord);
    const core::SeqInfo& seq = s_work.seq;
    const std::int32_t first = coord.q_tile * core::kBwdTileRows;
    s_work.output = BackwardOutput::dq;
    s_work.first_row = first;
    s_work.rows = min(core::kBwdTileRows, seq.q_len - first);
    s_work.first_head = coord.head / p.group;
    s_work.heads = 1;
    s_work.a_row = seq.q_row + first;
    s_work.b_row = seq.k_row;
    s_work.a_batch = p.fwd.cu_seqlens_q != nullptr ? 0 : coord.batch;
    s_work.b_batch = p.fwd.cu_seqlens_k != nullptr ? 0 : coord.batch;
    find_tiles(s_work, seq.mask, kStepKeys);
    return s_work.rows > 0;
  }

  static constexpr std::int32_t kStepQueries = C::kShape.query_step();
  static constexpr std::int32_t kStepKeys = C::kShape.key_step();

  static __device__ __forceinline__ void find_tiles(BwdWorkTile& s_work, const core::Mask& mask,
                                                    std::int32_t step) {
    s_work.edges = core::mask_edges(mask, s_work.first_row);
    if (s_work.rows > 0) {
      core::find_bwd_tiles(s_work, mask, s_work.first_row, step);
    } else {
      s_work.tiles = 0;
    }
  }
};

// ---------------------------------------------------------------------------------------------
// Producer

template <typename C>
struct BwdProducer : BwdRoleThread<C> {
  template <typename Steps>
  __device__ __forceinline__ void load_a1(BwdQueueState queue) const {
    load_a<typename C::TileA1>(this->s.a1(), Steps::kOfKeys ? this->params.k : this->params.q,
                               queue, this->s.template barrier<Sm90BwdBarrier::a1_full>(0));
  }
  template <typename Steps>
  __device__ __forceinline__ void load_a2(BwdQueueState queue) const {
    load_a<typename C::TileA2>(this->s.a2(), Steps::kOfKeys ? this->params.v : this->params.dout,
                               queue, this->s.template barrier<Sm90BwdBarrier::a2_full>(0));
  }
  template <typename Steps>
  __device__ __forceinline__ void load_b1(BwdQueueState queue, typename Steps::State b,
                                          const BwdStep& step) const {
    load_b<Steps, typename C::template TileB1<Steps>>(
        this->s.template b1<Steps>(b.stage()), Steps::kOfKeys ? this->params.q : this->params.k,
        queue, step, this->s.template barrier<Steps::kB1Full>(b.stage()));
  }
  template <typename Steps>
  __device__ __forceinline__ void load_b2(BwdQueueState queue, typename Steps::B2State b,
                                          const BwdStep& step) const {
    load_b<Steps, typename C::template TileB2<Steps>>(
        this->s.template b2<Steps>(b.stage()), Steps::kOfKeys ? this->params.dout : this->params.v,
        queue, step, this->s.template barrier<Steps::kB2Full>(b.stage()));
  }

 private:
  static constexpr int kBoxRows = C::kShape.box_rows();
  template <typename Tile, int kRows>
  static __device__ __forceinline__ void load_rows(unsigned char* s_tile, const CUtensorMap& map,
                                                   int row, int head, int batch,
                                                   std::uint64_t& s_full) {
    arrive_expect_tx(s_full, Tile::kBytes);
#pragma unroll
    for (int first = 0; first < kRows; first += kBoxRows) {
      load_panels<Tile>(s_tile + first * core::kPanelRowBytes, map, row + first, head, batch,
                        s_full);
    }
  }
  template <typename Tile>
  __device__ __forceinline__ void load_a(unsigned char* s_tile, const CUtensorMap& map,
                                         BwdQueueState queue, std::uint64_t& s_full) const {
    const BwdWorkTile& work = this->work(queue);
    load_rows<Tile, core::kBwdTileRows>(s_tile, map, work.a_row, work.head, work.a_batch, s_full);
  }
  template <typename Steps, typename Tile>
  __device__ __forceinline__ void load_b(unsigned char* s_tile, const CUtensorMap& map,
                                         BwdQueueState queue, const BwdStep& step,
                                         std::uint64_t& s_full) const {
    const BwdWorkTile& work = this->work(queue);
    load_rows<Tile, Steps::kRows>(s_tile, map, work.b_row + step.tile * Steps::kRows,
                                  work.first_head + step.head, work.b_batch, s_full);
  }
};

// ---------------------------------------------------------------------------------------------
// Tail warp

template <typename C>
struct BwdTailWarp : BwdRoleLanes<C> {
  static constexpr int kQueries = C::kShape.query_step();
  static constexpr int kEach = (kQueries + 31) / 32;  // rows of a lane
  float base[kEach], delta[kEach];
  BwdScalars scalars;

  template <typename Steps>
  __device__ __forceinline__ void read_rows(BwdQueueState queue, const BwdStep& step) {
    if constexpr (Steps::kOfKeys) {
      const core::BackwardParams& p = this->params.call;
      const BwdWorkTile& work = this->work(queue);
      const std::int32_t h = work.first_head + step.head;
      scalars.ds_scale = C::kScalesDs ? core::ds_unit(p, work.b, work.head) : 1.f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const std::int32_t row = step.tile * kQueries + 32 * i + this->lane;
        base[i] = -core::negative_infinity<float>();
        delta[i] = 0.f;
        if (row < work.seq.q_len) {
          const std::int64_t at = core::partial_row(p.fwd, work.b, h, work.seq.q_row, row);
          base[i] = log2_base(p, at);
          delta[i] = row_delta(p, at, row + 1 < work.seq.q_len) * scalars.ds_scale;
        }
      }
      scalars.alibi_slope = C::kOptions ? alibi_slope(p, work.b, h) : 0.f;
    }
  }
  template <typename Steps>
  __device__ __forceinline__ void store_rows(typename Steps::State b) const {
    if constexpr (Steps::kOfKeys) {
      BwdRows<kQueries>& s_rows = this->s.rows(b.stage());
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (kQueries % 32 != 0 && 32 * i + this->lane >= kQueries) break;
        s_rows.base[32 * i + this->lane] = base[i];
        s_rows.delta[32 * i + this->lane] = delta[i];
      }
      if (this->lane == 0) this->s.scalars[b.stage()] = scalars;
    }
  }

  /// True if rows of B past the last one are not zero.
  template <typename Steps>
  __device__ __forceinline__ bool has_dirty_tail(BwdQueueState queue, const BwdStep& step) const {
    const bool dirty = Steps::kOfKeys ? this->params.q_tail_dirty : this->params.k_tail_dirty;
    return dirty && rows_left<Steps>(queue, step) < Steps::kRows;
  }
  /// Zero-fills those that enter sums: their weights are 0, but 0 * NaN is NaN.
  template <typename Steps>
  __device__ __forceinline__ void zero_tail(BwdQueueState queue, typename Steps::State b,
                                            const BwdStep& step) const {
    using Tile1 = typename C::template TileB1<Steps>;
    using Tile2 = typename C::template TileB2<Steps>;
    const int rows = max(rows_left<Steps>(queue, step), 0);
    if constexpr (Steps::kHasDx && Steps::kHasDv) {  // B2 follows B1
      zero_rows<Tile1, Tile1::kPanels + Tile2::kPanels>(this->s.template b1<Steps>(b.stage()),
                                                        rows);
    } else if constexpr (Steps::kHasDx) {
      zero_rows<Tile1, Tile1::kPanels>(this->s.template b1<Steps>(b.stage()), rows);
    } else {
      zero_rows<Tile2, Tile2::kPanels>(this->s.template b2<Steps>(b.stage()), rows);
    }
    fence_async_proxy();
  }

 private:
  /// Zero-fills the rows of panels from `first` on.
  template <typename Tile, int kPanels>
  __device__ __forceinline__ void zero_rows(unsigned char* s_tile, int first) const {
    constexpr int kVecs = core::kPanelRowBytes / 16;
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll 1
      for (int i = first * kVecs + this->lane; i < Tile::kPanelBytes / 16; i += 32) {
        *reinterpret_cast<uint4*>(s_tile + panel * Tile::kPanelBytes + i * 16) = {};
      }
    }
  }
  template <typename Steps>
  __device__ __forceinline__ int rows_left(BwdQueueState queue, const BwdStep& step) const {
    const core::SeqInfo& seq = this->work(queue).seq;
    return (Steps::kOfKeys ? seq.q_len : seq.kv_len) - step.tile * Steps::kRows;
  }
};

}  // namespace flashcore::cuda::sm90
