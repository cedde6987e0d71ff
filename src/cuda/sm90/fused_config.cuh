// Compile-time configuration of a fused Hopper kernel for gradients, and its shared memory.
#pragma once

#include "core/sm90_fused_roles.h"
#include "cuda/sm90/bwd_config.cuh"
#include "cuda/sm90/fused_params.h"

namespace flashcore::cuda::sm90 {

template <typename Element_, int kHeadDim_, int kVDim_, int kTileQ_, int kTileK_, int kStages_,
          int kWarpRows, int kThreads_>
struct FusedConfig {
  using Element = Element_;
  static constexpr bool kOptions = false;
  static constexpr bool kFused = true, kF32Gradients = true;
  static constexpr core::Sm90FusedTraits kShape{kHeadDim_};
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kVDim = kVDim_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kDqFloats = core::kFusedStepRows * kHeadDim;  // of a dQ tile
  // dS has less range than f32 in f16: it is kept times a power of two.
  static constexpr bool kScalesDs = std::is_same_v<Element, __half>;
  // Shared memory tiles, 128B swizzle.
  using TileA1 = core::PanelTile<core::kBwdTileRows, kHeadDim>;
  using TileA2 = TileA1;
  template <typename Steps>
  using TileB1 = core::PanelTile<Steps::kRows, kHeadDim>;
  template <typename Steps>
  using TileB2 = TileB1<Steps>;
  using TileDz = core::PanelTile<core::kBwdTileRows, core::kFusedStepRows>;  // dZᵀ
  // The forward's Thread and store_row() read these.
  static constexpr bool kPackGqa = false, kFp8 = false;
  static_assert(kTileQ_ == core::kFusedStepRows && kTileK_ == core::kBwdTileRows);
  static_assert(kThreads == kShape.threads() && kWarpRows == 16 && kStages_ == core::kFusedStages);
  static_assert(kHeadDim % 16 == 0 && kVDim == kHeadDim);
};

template <typename Element, int kHeadDim, int kVDim, int kTileQ, int kTileK, int kStages,
          int kWarpRows, int kThreads>
struct alignas(1024) BwdStorage<
    FusedConfig<Element, kHeadDim, kVDim, kTileQ, kTileK, kStages, kWarpRows, kThreads>> {
  using C = FusedConfig<Element, kHeadDim, kVDim, kTileQ, kTileK, kStages, kWarpRows, kThreads>;
  using TileB = typename C::template TileB1<core::FusedSteps>;
  unsigned char a[2][C::TileA1::kBytes];          // K, V: [128, head_dim]
  unsigned char ring[kStages][2][TileB::kBytes];  // per stage: Q, dO, [64, head_dim]
  unsigned char dz[kStages][C::TileDz::kBytes];   // [128 keys, 64 queries]
  float dq[kStages][C::kDqFloats];                // accumulators: [registers / 4][128 threads][4]
  alignas(16) BwdRows<core::kFusedStepRows> row_stats[kStages];
  BwdScalars scalars[kStages];
  BwdWorkTile work_tiles[core::kBwdTileSlots];
  core::BwdTileState tile_states[core::kBwdTileSlots];      // of K and V, if the tile has steps
  std::uint64_t barriers[core::mbarrier_count(C::kShape)];  // core/sm90_fused_pipeline.h

  template <Sm90BwdBarrier kBarrier>
  __device__ __forceinline__ std::uint64_t& barrier(std::uint32_t slot) {
    constexpr int kFirst = core::first_mbarrier(C::kShape, kBarrier);
    return barriers[kFirst + slot];
  }
  __device__ __forceinline__ unsigned char* a1() { return a[0]; }
  __device__ __forceinline__ unsigned char* a2() { return a[1]; }
  template <typename Steps>
  __device__ __forceinline__ unsigned char* b1(std::uint32_t stage) {
    return ring[stage][0];
  }
  template <typename Steps>
  __device__ __forceinline__ unsigned char* b2(std::uint32_t stage) {
    return ring[stage][1];
  }
  __device__ __forceinline__ BwdRows<core::kFusedStepRows>& rows(std::uint32_t stage) {
    return row_stats[stage];
  }
};

}  // namespace flashcore::cuda::sm90
