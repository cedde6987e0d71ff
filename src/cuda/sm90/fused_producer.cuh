// The threads beside the consumers of a fused kernel: scheduler, and the thread that adds dQ tiles
// to memory. Producer and tail warp are those of the split form.
#pragma once

#include "cuda/primitives/bulk_store.cuh"
#include "cuda/sm90/bwd_producer.cuh"
#include "cuda/sm90/fused_config.cuh"

namespace flashcore::cuda::sm90 {

template <typename C>
struct FusedScheduler : BwdSchedulerThread<C> {
  const FusedParams& fused;
  core::BwdTileState next_with_steps;

  /// All tickets come from the counter: a CTA that runs holds every ticket below its own, or
  /// another running CTA does. The counter wraps to 0 with the last fetch.
  __device__ __forceinline__ std::int32_t first_index() const { return fetch_tile(); }
  __device__ __forceinline__ std::int32_t fetch_tile() const {
    const std::uint32_t last = this->params.num_scheduled + gridDim.x - 1;
    return static_cast<std::int32_t>(atomicInc(this->params.tile_counter, last));
  }

  __device__ __forceinline__ bool decode_work_tile(BwdQueueState queue, std::int32_t index) {
    const core::BackwardParams& p = this->params.call;
    const core::FusedCoord coord = core::coord_of(fused.order, index);
    BwdWorkTile& s_work = this->work(queue);
    this->select_sequence(s_work, {coord.batch, coord.head, 0});
    const core::SeqInfo& seq = s_work.seq;
    s_work.output = core::FusedSteps::kOutput;
    s_work.first_row = coord.key_tile * core::kFusedTileRows;
    s_work.rows = min(core::kFusedTileRows, seq.kv_len - s_work.first_row);
    s_work.first_head = coord.head * p.group;
    s_work.heads = p.group;
    if (this->has_fault(InjectedFault::group_last_head_only) && p.group > 0) {
      s_work.first_head += p.group - 1;
      s_work.heads = 1;
    }
    s_work.a_row = seq.k_row + s_work.first_row;
    s_work.b_row = seq.q_row;
    s_work.a_batch = p.fwd.cu_seqlens_k != nullptr ? 0 : coord.batch;
    s_work.b_batch = p.fwd.cu_seqlens_q != nullptr ? 0 : coord.batch;
    const bool drops = this->has_fault(InjectedFault::last_query_tile_dropped);
    const std::int32_t q_len = drops ? max(seq.q_len - core::kFusedStepRows, 0) : seq.q_len;
    this->find_tiles(s_work, core::transposed(seq.mask, q_len), core::kFusedStepRows);
    mask_missing_keys(s_work);
    // Rows past the last key of a dense sequence are written too.
    if (p.fwd.cu_seqlens_k != nullptr && s_work.rows <= 0) return false;
    this->s.tile_states[queue.stage()] = next_with_steps;
    if (s_work.tiles > 0) next_with_steps.advance();
    return true;
  }

 private:
  /// Keys past the last one need a mask in every step.
  static __device__ __forceinline__ void mask_missing_keys(BwdWorkTile& s_work) {
    for (int group = 0; group < core::kBwdConsumers; ++group) {
      const bool whole = s_work.rows >= core::kFusedTileRows / core::kBwdConsumers * (group + 1);
      if (!whole) s_work.unmasked_tiles[group] = {0, 0};
    }
  }
};

/// A dQ tile that a step adds to.
struct DqTurn {
  std::int64_t tile;
  std::uint32_t turn;  // additions before
  bool come;
};

template <typename C>
struct FusedStoreThread : BwdRoleThread<C> {
  static constexpr int kDqBytes = C::kDqFloats * static_cast<int>(sizeof(float));
  const FusedParams& fused;
  DqTurn now, next;

  __device__ __forceinline__ float* sums_of(const DqTurn& at) const {
    return static_cast<float*>(this->params.call.dq_partials) + at.tile * C::kDqFloats;
  }

  /// Finds the turn of a step, and whether it has come.
  __device__ __forceinline__ void look_at_turn(BwdQueueState queue, const BwdStep& step) {
    const BwdWorkTile& work = this->work(queue);
    next.tile = core::partial_tile(this->params.call.fwd, work.b, work.first_head + step.head,
                                   work.seq.q_row, step.tile);
    next.turn = core::turn_of(work.seq.mask, work.seq.q_len, step.tile,
                              work.first_row / core::kFusedTileRows);
    if (fused.reads_sums_ahead && next.turn != 0) prefetch_l2(sums_of(next), kDqBytes);
    next.come = next.turn == 0 || count_is(fused.turns + next.tile, next.turn);
  }
  /// Waits until the dQ tile has the sum over the keys before this work tile.
  __device__ __forceinline__ void wait_turn() {
    now = next;
    if (!now.come) wait_for_count(fused.turns + now.tile, now.turn);
    fence_global_proxy();
  }
  /// Adds the dQ tile of a stage. The first addition is a store, so that nothing has to be zeroed.
  __device__ __forceinline__ void add_dq(core::FusedSteps::State b) const {
    float* const g_to = sums_of(now);
    const float* const s_from = this->s.dq[b.stage()];
    if (now.turn == 0) {
      bulk_store(g_to, s_from, kDqBytes);
    } else {
      bulk_add(g_to, s_from, kDqBytes);
    }
    bulk_commit();
    if (now.turn == 0 && this->has_fault(InjectedFault::dq_tile_twice)) {
      bulk_wait();
      bulk_add(g_to, s_from, kDqBytes);
      bulk_commit();
    }
  }
  __device__ __forceinline__ void wait_read() const { bulk_wait_read(); }
  /// Lets the next key tile add to the dQ tile.
  __device__ __forceinline__ void pass_turn() const {
    bulk_wait();
    fence_global_proxy();
    set_count(fused.turns + now.tile, now.turn + 1);
  }
};

}  // namespace flashcore::cuda::sm90
