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

/// kOptions: the call has score modifications, or gradients in f32.
template <typename Element_, int kHeadDim_, int kVDim_, int kTileQ_, int kTileK_, int kStages_,
          int kWarpRows, int kThreads_, bool kOptions_ = false>
struct BwdConfig {
  using Element = Element_;
  using WithOptions =
      BwdConfig<Element, kHeadDim_, kVDim_, kTileQ_, kTileK_, kStages_, kWarpRows, kThreads_, true>;
  static constexpr bool kOptions = kOptions_;
  static constexpr bool kFused = false, kF32Gradients = kOptions;
  static constexpr core::Sm90BwdTraits kShape{kHeadDim_, kVDim_, kStages_, kOptions};
  static constexpr core::Sm90BwdTraits kFastShape{kHeadDim_, kVDim_, kStages_};
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kVDim = kVDim_;
  static constexpr int kThreads = kThreads_;
  using Phases = core::BwdPhasesOf<kShape>;
  // dS has less range than f32 in f16: it is kept times a power of two.
  static constexpr bool kScalesDs = std::is_same_v<Element, __half>;
  // Shared memory tiles, 128B swizzle.
  using TileA1 = core::PanelTile<core::kBwdTileRows, kHeadDim>;
  using TileA2 = core::PanelTile<core::kBwdTileRows, kVDim>;
  template <typename Steps>
  using TileB1 = core::PanelTile<Steps::kRows, kHeadDim>;
  template <typename Steps>
  using TileB2 = core::PanelTile<Steps::kRows, kVDim>;
  // The forward's Thread and store_row() read these.
  static constexpr bool kPackGqa = false, kFp8 = false;
  static_assert(kTileQ_ == core::kBwdTileRows && kTileK_ == core::kBwdTileRows);
  static_assert(kThreads == kShape.threads() && kWarpRows == 16);
  static_assert(kShape.b1_stages(BackwardOutput::dq) >= 2);
  static_assert(kHeadDim % 16 == 0 && kVDim % 16 == 0);
};

/// The rows of A of a work tile, and where its operands are.
struct BwdWorkTile : core::BwdSteps {
  core::SeqInfo seq;
  core::MaskEdges edges;  // of the rows of A: the visible rows of B
  std::int32_t b;
  std::int32_t head;        // a KV head (tiles of keys) or a query head (dq)
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

/// Bytes of the statistics of all stages.
template <typename C>
constexpr int bwd_rows_bytes() {
  constexpr auto bytes = [](const core::Sm90BwdTraits& shape) {
    return shape.query_stages() * shape.query_step() * static_cast<int>(sizeof(BwdRows<1>));
  };
  constexpr int kFast = bytes(C::kFastShape), kWithOptions = bytes(C::WithOptions::kShape);
  return kFast > kWithOptions ? kFast : kWithOptions;
}

template <typename C>
struct alignas(1024) BwdStorage {
  // A1 [128, head_dim], A2 [128, v_dim], then the stages of the steps (core/sm90_bwd_traits.h):
  // B1 [step rows, head_dim], B2 [step rows, v_dim].
  unsigned char operands[C::kShape.operand_bytes()];
  // Both kernels of a shape have one size. The one with options has smaller steps, and more.
  alignas(16) unsigned char row_bytes[bwd_rows_bytes<C>()];
  BwdScalars scalars[C::WithOptions::kShape.query_stages()];
  BwdWorkTile work_tiles[core::kBwdTileSlots];
  std::uint64_t barriers[core::mbarrier_count(C::WithOptions::kShape)];  // sm90_bwd_pipeline.h

  template <Sm90BwdBarrier kBarrier>
  __device__ __forceinline__ std::uint64_t& barrier(std::uint32_t slot) {
    constexpr int kFirst = core::first_mbarrier(C::kShape, kBarrier);
    return barriers[kFirst + slot];
  }
  __device__ __forceinline__ unsigned char* a1() { return operands; }
  __device__ __forceinline__ unsigned char* a2() { return operands + C::TileA1::kBytes; }
  template <typename Steps>
  __device__ __forceinline__ unsigned char* b1(std::uint32_t stage) {
    constexpr int kFirst = C::kShape.ring_begin(Steps::kOutput);
    constexpr int kStride = C::kShape.b1_stride(Steps::kOutput);
    return operands + kFirst + stage * kStride;
  }
  template <typename Steps>
  __device__ __forceinline__ unsigned char* b2(std::uint32_t stage) {
    constexpr int kFirst = C::kShape.b2_begin(Steps::kOutput);
    constexpr int kStride = C::kShape.b2_stride(Steps::kOutput);
    return operands + kFirst + stage * kStride;
  }
  __device__ __forceinline__ BwdRows<C::kShape.query_step()>& rows(std::uint32_t stage) {
    return reinterpret_cast<BwdRows<C::kShape.query_step()>*>(row_bytes)[stage];
  }
};

/// Initialises all slots of a barrier.
template <typename C, Sm90BwdBarrier kBarrier>
__device__ __forceinline__ void init_bwd_barrier(BwdStorage<C>& s) {
  constexpr int kSlots = sm90_barrier(C::kShape, kBarrier).slots;
  constexpr int kArrivals = sm90_barrier(C::kShape, kBarrier).arrivals;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    init_barrier(s.template barrier<kBarrier>(slot), kArrivals);
  }
}

/// Initialises the barriers from kFirst on.
template <typename C, int kFirst = 0>
__device__ __forceinline__ void init_bwd_barriers(BwdStorage<C>& s) {
  if constexpr (kFirst < core::kSm90BwdBarriers) {
    init_bwd_barrier<C, static_cast<Sm90BwdBarrier>(kFirst)>(s);
    init_bwd_barriers<C, kFirst + 1>(s);
  } else {
    fence_barrier_init();
  }
}

/// Base of the warps of all roles.
template <typename C>
struct BwdRoleWarp {
  using Barrier = Sm90BwdBarrier;
  using Queue = BwdQueueState;
  BwdStorage<C>& s;
  const BwdParams& params;

  template <Sm90BwdBarrier kBarrier, typename State>
  __device__ __forceinline__ void wait(const State& state) const {
    constexpr bool kEmpty = sm90_barrier(C::kShape, kBarrier).empty;
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
