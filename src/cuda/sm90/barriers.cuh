// Waits and arrivals of the warps of a Hopper CTA. core/sm90_pipeline.h has the table of
// mbarriers and the enum of named barriers, core/sm90_roles.h the roles that use them.
#pragma once

#include "cuda/primitives/mbarrier.cuh"
#include "cuda/primitives/named_barrier.cuh"
#include "cuda/sm90/config.cuh"

namespace flashcore::cuda::sm90 {

template <typename C>
__device__ __forceinline__ void init_barriers(SharedStorage<C>& s, int producers, bool too_few) {
  constexpr core::Sm90Traits kShape = C::kShape;
  int next = 0;
#pragma unroll
  for (int i = 0; i < core::kSm90Barriers; ++i) {
    const auto barrier = static_cast<Sm90Barrier>(i);
    const int slots = core::sm90_barrier(kShape, barrier).slots;
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      init_barrier(s.barriers[next++], core::initial_arrivals(kShape, barrier, producers, too_few));
    }
  }
  fence_barrier_init();
}

__device__ __forceinline__ void sync(core::NamedBarrier barrier, int threads) {
  named_barrier_sync(static_cast<int>(barrier), threads);
}
__device__ __forceinline__ void arrive(core::NamedBarrier barrier, int threads) {
  named_barrier_arrive(static_cast<int>(barrier), threads);
}

/// Base of the warps of all roles. State: a PipelineState or a QStage.
template <typename C>
struct RoleWarp {
  using Barrier = Sm90Barrier;
  using Queue = TileQueueState;
  using Pipeline = typename C::Pipeline;
  SharedStorage<C>& s;
  const Params& params;

  template <Sm90Barrier kBarrier, typename State>
  static __device__ __forceinline__ std::uint32_t parity(const State& state) {
    constexpr bool kEmpty = core::sm90_barrier(C::kShape, kBarrier).empty;
    return core::parity_of_last(core::phases_before(kEmpty, state.round()));
  }
  template <Sm90Barrier kBarrier, typename State>
  __device__ __forceinline__ void wait(const State& state) const {
    cuda::wait(s.template barrier<kBarrier>(state.stage()), parity<kBarrier>(state));
  }
  template <Sm90Barrier kBarrier, typename State>
  __device__ __forceinline__ bool test_wait(const State& state) const {
    return cuda::test_wait(s.template barrier<kBarrier>(state.stage()), parity<kBarrier>(state));
  }
  __device__ __forceinline__ WorkTile& work(TileQueueState queue) const {
    return s.work_tiles[queue.stage()];
  }
  __device__ __forceinline__ bool has_fault(InjectedFault fault) const {
    return params.call.fault.is(fault);
  }
};

/// A role that one thread plays.
template <typename C>
struct RoleThread : RoleWarp<C> {
  template <Sm90Barrier kBarrier, typename State>
  __device__ __forceinline__ void arrive(const State& state) const {
    cuda::arrive(this->s.template barrier<kBarrier>(state.stage()));
  }
};

}  // namespace flashcore::cuda::sm90
