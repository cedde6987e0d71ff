// Compile-time configuration of an sm80 kernel for gradients, its shared memory, and the map from
// threads to accumulator elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "core/backward_tiles.h"
#include "core/backward_traits.h"
#include "core/ds_unit.h"
#include "core/mma_layout.h"
#include "core/seq_info.h"

namespace flashcore::cuda::sm80 {

using core::BackwardOutput;
using core::BackwardParams;
using core::InjectedFault;
using core::KeyRange;

/// The shape of the work tiles of an output: rows of A of the CTA, rows of B of a step.
/// kWeightsInRegisters: a warp has its rows of A in all products, and dZ is an operand without
/// passing through shared memory. Else two warps share 32 rows of a gradient.
template <typename Element_, int kHeadDim_, int kTile_, int kStep_, int kThreads_,
          bool kWeightsInRegisters_>
struct BwdShape {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // head_dim and v_dim at most
  static constexpr int kTile = kTile_;        // rows of A, of the CTA
  static constexpr int kStep = kStep_;        // rows of B, of a step
  static constexpr int kThreads = kThreads_;
  static constexpr bool kWeightsInRegisters = kWeightsInRegisters_;
  static constexpr int kGemmSteps = kHeadDim / 16;
  // Buffers of B1 and B2.
  static constexpr int kStagesB1 = 2;
  static constexpr int kStagesB2 = kWeightsInRegisters ? 2 : 1;
  // Warps of the products over columns, S = A1 B1ᵀ and dP = A2 B2ᵀ: kPairWarps × kPairSplits. A
  // warp has kPairRows rows of A and kPairColumns rows of B.
  static constexpr int kWarps = kThreads / 32;
  static_assert((kWarps & (kWarps - 1)) == 0);
  static constexpr int kPairSplits = kWeightsInRegisters ? 1 : 2;
  static constexpr int kPairWarps = kWarps / kPairSplits;
  static constexpr int kPairRows = kTile / kPairWarps;
  static constexpr int kPairColumns = kStep / kPairSplits;
  static constexpr int kPairRowTiles = kPairRows / 16;
  static constexpr int kPairColumnTiles = kPairColumns / 8;
  // Warps of the products over pairs, dZ B1 and P B2: kRowWarps × kColumnWarps. A warp has its part
  // of the rows of A, and of every kColumnWarps groups of 16 columns one.
  static constexpr int kRowWarps = kTile / 32;
  static constexpr int kColumnWarps = kWarps / kRowWarps;
  static constexpr int kRowTiles = kTile / kRowWarps / 16;
  static constexpr int kGroups = kHeadDim / 16 / kColumnWarps;
  // True if the warps that share the weights of 32 rows are also those that find them.
  static constexpr bool kWarpsShareRows = kPairWarps == kRowWarps;
  using TileA = core::SwizzledTile<kTile, kHeadDim>;
  using TileB = core::SwizzledTile<kStep, kHeadDim>;
  using Weights = core::SwizzledTile<kTile, kStep>;
  static_assert(kPairRows % 16 == 0 && kPairColumns % 16 == 0 && kTile % (16 * kRowWarps) == 0);
  static_assert(kHeadDim % (16 * kColumnWarps) == 0 && TileB::kPanelChunks / 2 % kColumnWarps == 0);
};

/// Element is the type of q, k, v and dout.
template <typename Element_, int kHeadDim_, int kTileQ_, int kTileK_, int kStages_, int kWarpRows_,
          int kThreads_>
struct BwdConfig {
  static constexpr core::Sm80BackwardTraits kShape{kHeadDim_, kThreads_};
  static constexpr int kThreads = kThreads_;
  static constexpr int kMinCtas = kShape.blocks_per_sm();  // per SM
  using Keys = BwdShape<Element_, kHeadDim_, kTileK_, kShape.query_step(), kThreads_, false>;
  using Queries = BwdShape<Element_, kHeadDim_, kTileQ_, kShape.key_step(), kThreads_,
                           kShape.weights_in_registers()>;
  static_assert(kStages_ == 1 && kWarpRows_ == Queries::kPairRows);
};

/// Named barriers: of the even and the odd warps, which share the weights of half of the rows.
enum BwdBarrier : int { kEvenWeights = 1, kOddWeights = 2 };

/// Steps of a work tile: rows [begin, end) of B, for each of `heads` query heads.
struct BwdSteps {
  std::int32_t begin, end;  // begin is a multiple of the step
  std::int32_t first_head, heads;
};

/// The rows of A that the CTA processes, and its steps. One thread writes it, all read it.
struct alignas(16) BwdWork {
  core::SeqInfo seq;
  std::int32_t b, h, kv_head;
  std::int32_t first_a, rows_a;
  BwdSteps steps;
  core::KeyRange plain;  // steps inside these rows of B need no mask
  float unit;            // of dS (core::ds_unit)
};

/// Weights that pass through shared memory.
template <typename C, bool kStored = !C::kWeightsInRegisters>
struct BwdWeights {
  using Element = typename C::Element;
  alignas(128) Element p[C::Weights::kElements];   // [tile, step], swizzled
  alignas(128) Element dz[C::Weights::kElements];  // [tile, step], swizzled
};
template <typename C>
struct BwdWeights<C, false> {};

/// Shared memory of a work tile.
template <typename C>
struct alignas(128) BwdTiles : BwdWeights<C> {
  using Element = typename C::Element;
  alignas(128) Element a1[C::TileA::kElements];                // [tile, head_dim], swizzled
  alignas(128) Element a2[C::TileA::kElements];                // [tile, head_dim], swizzled
  alignas(128) Element b1[C::kStagesB1][C::TileB::kElements];  // [stages][step, head_dim]
  alignas(128) Element b2[C::kStagesB2][C::TileB::kElements];  // [stages][step, head_dim]
  // Statistics of the query rows. These are rows of A or of B.
  static constexpr int kMaxRows = C::kTile > C::kStep ? C::kTile : C::kStep;
  float base[kMaxRows], factor[kMaxRows], delta[kMaxRows];
  KeyRange range[kMaxRows];
  BwdWork work;
};

/// Shared memory of a kernel. A CTA has one work tile.
template <typename Config>
union BwdStorage {
  BwdTiles<typename Config::Keys> keys;
  BwdTiles<typename Config::Queries> queries;
};

/// Pairs of a thread: S, dP, or their gradients.
template <typename C>
using AccPairs = float[C::kPairRowTiles][C::kPairColumnTiles][4];
/// A thread's part of a gradient: 16 columns are two n-tiles.
template <typename C>
using AccGradient = float[C::kRowTiles][C::kGroups][2][4];

/// A thread's position in the accumulators of its warp.
template <typename C>
struct BwdThread {
  int lane, warp;

  // Masks tell the compiler the ranges.
  __device__ __forceinline__ explicit BwdThread(int index)
      : lane(index & 31), warp(index >> 5 & (C::kWarps - 1)) {}
  // Positions in the accumulators of pairs.
  __device__ __forceinline__ int pair_row0() const { return warp % C::kPairWarps * C::kPairRows; }
  __device__ __forceinline__ int pair_column0() const {
    return warp / C::kPairWarps * C::kPairColumns;
  }
  __device__ __forceinline__ int pair_row(int m, int half) const {
    return pair_row0() + 16 * m + 8 * half + lane / 4;
  }
  __device__ __forceinline__ int pair_column(int n, int i) const {
    return pair_column0() + 8 * n + 2 * (lane % 4) + i;
  }
  // Positions in the accumulators of gradients.
  __device__ __forceinline__ int row0() const { return warp % C::kRowWarps * (16 * C::kRowTiles); }
  __device__ __forceinline__ int column_warp() const { return warp / C::kRowWarps; }
  __device__ __forceinline__ int row(int m, int half) const {
    return row0() + 16 * m + 8 * half + lane / 4;
  }
  __device__ __forceinline__ int column(int group, int tile) const {
    return 16 * (column_warp() + C::kColumnWarps * group) + 8 * tile + 2 * (lane % 4);
  }
};

}  // namespace flashcore::cuda::sm80
