// The shape of a tensor-core kernel and what its block keeps in shared memory.
#pragma once

#include <cuda_runtime.h>

#include "core/mma_layout.h"
#include "core/sm80_shape.h"
#include "core/softmax_state.h"
#include "cuda/sm80/item.cuh"

namespace flashcore::cuda::sm80 {

template <typename Element_, int kHeadDim_, int kTileQ_, int kTileK_, int kStages_, int kWarpRows_,
          int kThreads_>
struct Config {
  using Element = Element_;
  static constexpr core::Sm80Shape kShape{kHeadDim_, kTileQ_,    kTileK_,
                                          kStages_,  kWarpRows_, kThreads_};
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kTileQ = kTileQ_;
  static constexpr int kTileK = kTileK_;
  static constexpr int kStages = kStages_;
  static constexpr int kWarpRows = kWarpRows_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kRowWarps = kShape.row_warps();
  static constexpr int kKeyWarps = kShape.key_warps();
  static constexpr int kWarpKeys = kShape.warp_keys();
  static constexpr int kOptionKeys = kWarpKeys % 32 == 0 ? 32 : 16;
  static constexpr int kRowTiles = kWarpRows / 16;   // m-tiles of a warp
  static constexpr int kColumnTiles = kHeadDim / 8;  // n-tiles of its output
  static constexpr int kSteps = kHeadDim / 16;       // k-steps of Q K^T
  static constexpr bool kOwnKeys = kShape.own_keys();
  static constexpr bool kKeepsQueries = kShape.keeps_queries();
  static constexpr int kMinBlocks = kShape.blocks_per_sm();
  using QueryTile = core::SwizzledTile<kTileQ, kHeadDim>;
  using KeyTile = core::SwizzledTile<kTileK, kHeadDim>;  // of K and of V
  static_assert(kRowWarps * kKeyWarps * 32 == kThreads && kWarpKeys % 16 == 0 &&
                kHeadDim % 32 == 0);
};

/// What a block passes around when its loop is over. Rows of o are padded so that the lanes of a
/// warp write to different banks.
template <typename C>
struct Results {
  float o[C::kKeyWarps][C::kTileQ][C::kHeadDim + 8];
  core::SoftmaxState<float> state[C::kKeyWarps][C::kTileQ];
  core::SoftmaxState<float> joined[C::kTileQ];  // over the key warps; then o[0] is
};

/// A thread's softmax states, of the row of register pair `half` of m-tile m. A row's sum is spread
/// over the four lanes of its quad until the end. They are looked at once per step: in registers
/// they would displace scores.
template <typename C>
struct alignas(16) RowStates {
  core::SoftmaxState<float> of[C::kRowTiles][2];
};

template <typename C>
struct alignas(128) SharedStorage {
  using T = typename C::Element;
  union {
    struct {
      alignas(128) T q[C::QueryTile::kElements];
      alignas(128) T k[C::kStages][C::KeyTile::kElements];
      alignas(128) T v[C::kStages][C::KeyTile::kElements];
    };
    Results<C> results;
  };
  RowStates<C> states[C::kThreads];
  WarpKeys warp_keys[C::kRowWarps];
  Item item;
  bool last;  // of the blocks of an item
};

/// A thread's place in its block and in the fragments of its warp.
template <typename C>
struct Thread {
  int lane, row_warp, key_warp;

  __device__ __forceinline__ explicit Thread(int index) {
    const int warp = index / 32;
    lane = index % 32;
    row_warp = warp % C::kRowWarps;
    key_warp = warp / C::kRowWarps;
  }
  /// Row of the tile that accumulator registers 2 half, 2 half + 1 of m-tile m belong to.
  __device__ __forceinline__ int row(int m, int half) const {
    return row_warp * C::kWarpRows + 16 * m + core::mma_c(lane, 2 * half).row;
  }
  /// Column of accumulator register reg of n-tile n.
  __device__ __forceinline__ int column(int n, int reg) const {
    return 8 * n + core::mma_c(lane, reg).column;
  }
};

// Accumulators of a warp: the scores of kKeys keys and the output.
template <typename C, int kKeys>
using Scores = float[C::kRowTiles][kKeys / 8][4];
template <typename C>
using Outputs = float[C::kRowTiles][C::kColumnTiles][4];

}  // namespace flashcore::cuda::sm80
