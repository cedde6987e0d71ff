// Compile-time configuration of a Hopper kernel for gradients, its shared memory, and the warps of
// its roles.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "core/seq_info.h"
#include "core/sm90_bwd_roles.h"
#include "core/wgmma_layout.h"
#include "cuda/primitives/mbarrier.cuh"
#include "cuda/primitives/wgmma.cuh"
#include "cuda/sm90/bwd_params.h"
#include "cuda/sm90/config.cuh"

namespace flashcore::cuda::sm90 {

using core::BackwardOutput;
using core::BwdQueueState;
using core::BwdStep;
using core::Sm90BwdBarrier;

/// kOptions: the call has score modifications.
template <typename Element_, int kHeadDim_, int kTileQ_, int kTileK_, int kStages_, int kWarpRows,
          int kThreads_, bool kOptions_ = false>
struct BwdConfig {
  using Element = Element_;
  using WithOptions =
      BwdConfig<Element, kHeadDim_, kTileQ_, kTileK_, kStages_, kWarpRows, kThreads_, true>;
  static constexpr bool kOptions = kOptions_;
  static constexpr core::Sm90BwdTraits kShape{kHeadDim_, kStages_, kOptions};
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kThreads = kThreads_;
  using DkDv = core::DkDvSteps<kShape>;
  using Dq = core::DqSteps<kShape>;
  // dS has less range than f32 in f16: it is kept times a power of two.
  static constexpr bool kScalesDs = std::is_same_v<Element, __half>;
  // Shared memory tiles, 128B swizzle.
  using TileA = core::PanelTile<core::kBwdTileRows, kHeadDim>;
  template <typename Steps>
  using TileB = core::PanelTile<Steps::kRows, kHeadDim>;
  // The forward's Thread and store_row() read these.
  static constexpr bool kPackGqa = false, kFp8 = false;
  static_assert(kTileQ_ == core::kBwdTileRows && kTileK_ == core::kBwdTileRows);
  static_assert(kThreads == kShape.threads() && kWarpRows == 16);
  static_assert(Dq::kStages >= 2 && kHeadDim % 16 == 0);
};

/// The rows of A of a work tile, and where its operands are.
struct BwdWorkTile : core::BwdSteps {
  core::SeqInfo seq;
  core::MaskEdges edges;  // of the rows of A: the visible rows of B
  std::int32_t b;
  std::int32_t head;        // a KV head (dkdv) or a query head (dq)
  std::int32_t first_row;   // of A
  std::int32_t first_head;  // of B: the first of `heads`
  // Coordinates in the tensor maps.
  std::int32_t a_row, b_row, a_batch, b_batch;
};

/// Statistics of the query rows of a step: P = 2^(score * log2(e) - base), delta as in
/// docs/numerics.md, times the scale of dS.
template <int kRows>
struct BwdRows {
  float base[kRows];
  float delta[kRows];
};
struct BwdScalars {
  float alibi_slope, ds_scale;
};

template <typename C>
struct alignas(1024) BwdStorage {
  unsigned char a1[C::TileA::kBytes], a2[C::TileA::kBytes];  // [128, head_dim]
  // Per stage [step rows, head_dim] of B1, then of B2. dkdv: Q, dO; dq: K, V.
  unsigned char ring[C::kShape.ring_bytes()];
  alignas(16) BwdRows<C::DkDv::kRows> rows[C::DkDv::kStages];
  // Kernels with options have more stages. Both have one size.
  BwdScalars scalars[C::WithOptions::kShape.dkdv_stages()];
  BwdWorkTile work_tiles[core::kBwdTileSlots];
  std::uint64_t barriers[core::mbarrier_count(C::WithOptions::kShape)];  // sm90_bwd_pipeline.h

  template <Sm90BwdBarrier kBarrier>
  __device__ __forceinline__ std::uint64_t& barrier(std::uint32_t slot) {
    constexpr int kFirst = core::first_mbarrier(C::kShape, kBarrier);
    return barriers[kFirst + slot];
  }
  template <typename Steps>
  __device__ __forceinline__ unsigned char* b1(std::uint32_t stage) {
    return ring + stage * (2 * C::template TileB<Steps>::kBytes);
  }
  template <typename Steps>
  __device__ __forceinline__ unsigned char* b2(std::uint32_t stage) {
    return b1<Steps>(stage) + C::template TileB<Steps>::kBytes;
  }
};

template <typename C>
__device__ __forceinline__ void init_bwd_barriers(BwdStorage<C>& s) {
  constexpr core::Sm90BwdTraits kShape = C::kShape;
  int next = 0;
#pragma unroll
  for (int i = 0; i < core::kSm90BwdBarriers; ++i) {
    const core::Sm90BarrierRow row = core::sm90_barrier(kShape, static_cast<Sm90BwdBarrier>(i));
#pragma unroll
    for (int slot = 0; slot < row.slots; ++slot) init_barrier(s.barriers[next++], row.arrivals);
  }
  fence_barrier_init();
}

/// Base of the warps of all roles.
template <typename C>
struct BwdRoleWarp {
  using Barrier = Sm90BwdBarrier;
  using Queue = BwdQueueState;
  using DkDv = typename C::DkDv;
  using Dq = typename C::Dq;
  BwdStorage<C>& s;
  const BwdParams& params;

  template <Sm90BwdBarrier kBarrier, typename State>
  __device__ __forceinline__ void wait(const State& state) const {
    constexpr bool kEmpty = core::sm90_barrier(C::kShape, kBarrier).empty;
    cuda::wait(s.template barrier<kBarrier>(state.stage()),
               core::parity_of_last(core::phases_before(kEmpty, state.round())));
  }
  __device__ __forceinline__ BwdWorkTile& work(BwdQueueState queue) const {
    return s.work_tiles[queue.stage()];
  }
  __device__ __forceinline__ bool has_fault(InjectedFault fault) const {
    return params.call.fwd.fault.is(fault);
  }
};

/// A role that one thread plays.
template <typename C>
struct BwdRoleThread : BwdRoleWarp<C> {
  template <Sm90BwdBarrier kBarrier, typename State>
  __device__ __forceinline__ void arrive(const State& state) const {
    cuda::arrive(this->s.template barrier<kBarrier>(state.stage()));
  }
};

/// A role of whole warps.
template <typename C>
struct BwdRoleLanes : BwdRoleWarp<C> {
  int lane;

  template <Sm90BwdBarrier kBarrier, typename State>
  __device__ __forceinline__ void arrive(const State& state) const {
    arrive_once_per_warp(this->s.template barrier<kBarrier>(state.stage()), lane);
  }
};

}  // namespace flashcore::cuda::sm90
