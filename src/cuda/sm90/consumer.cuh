// What both kinds of consumer warpgroups share: Q K^T, and how they wait for others.
#pragma once

#include "cuda/primitives/hopper.cuh"
#include "cuda/primitives/wgmma.cuh"
#include "cuda/sm90/config.cuh"
#include "cuda/sm90/softmax.cuh"

namespace flashcore::cuda::sm90 {

/// score = Q K^T, begun.
template <typename C>
__device__ __forceinline__ void issue_qk(AccS<C>& acc_s, SharedStorage<C>& s, int q_place,
                                         int stage) {
  using Q = typename C::QueryTile;
  using K = typename C::KeyTile;
  const std::uint64_t q = core::matrix_descriptor(shared_address(s.q[q_place]), 0);
  const std::uint64_t k = core::matrix_descriptor(shared_address(s.k[stage]), 0);
  using Product = Wgmma<C::kTileK>;
  Product::template ss<typename C::Operand, false>(acc_s, q, k);
#pragma unroll
  for (int step = 1; step < C::kProductSteps; ++step) {
    Product::template ss<typename C::Operand, true>(acc_s, core::advance(q, Q::k_offset(step)),
                                                    core::advance(k, K::k_offset(step)));
  }
  wgmma_commit();
}

/// What the consumer warps of 16-bit and of e4m3 tensors share (core/sm90_roles.h).
template <typename C>
struct ConsumerWarp : RoleWarp<C> {
  using Pipeline = typename C::Pipeline;
  using Position = core::KvTileIterator<Pipeline>;
  static constexpr bool kPingPong = C::kSchedule.ping_pong;
  const Thread<C> t;
  AccS<C> acc_s;
  AccO<C> acc_o;
  RowStats states;
  float rescale[2];

  __device__ __forceinline__ ConsumerWarp(SharedStorage<C>& s, const Params& params,
                                          const Thread<C>& thread)
      : RoleWarp<C>{s, params}, t(thread) {}

  __device__ __forceinline__ int group() const { return t.group; }

  template <Sm90Barrier kBarrier, typename Place>
  __device__ __forceinline__ void arrive(const Place& place) const {
    arrive_once_per_warp(this->s.template barrier<kBarrier>(place.stage()), t.lane);
  }

  __device__ __forceinline__ void ping_pong_wait() const {
    named_barrier_sync(core::ping_pong_barrier(t.group), core::kPingPongThreads);
  }
  __device__ __forceinline__ void ping_pong_arrive() const {
    named_barrier_arrive(core::ping_pong_barrier((t.group + 1) % C::kConsumers),
                         core::kPingPongThreads);
  }

  /// Whether some rows do not see all keys of the tile.
  __device__ __forceinline__ bool needs_mask(const Position& at) const {
    return !this->item(at.item).unmasked_tiles[t.group].contains(at.tile);
  }

  __device__ __forceinline__ void issue_qk(typename Pipeline::QStage queries,
                                           typename Pipeline::KvState keys, const Position&) {
    wgmma_fence();
    sm90::issue_qk<C>(acc_s, this->s, queries.place(), keys.stage());
  }
  template <int kPending>
  __device__ __forceinline__ void wgmma_wait() const {
    cuda::wgmma_wait<kPending>();
  }
  __device__ __forceinline__ void fence_acc_s() { fence_registers(acc_s); }
};

}  // namespace flashcore::cuda::sm90
