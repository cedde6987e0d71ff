// The shape of a tensor-core kernel and what its block keeps in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "core/dequant_f16.h"
#include "core/mma_layout.h"
#include "core/sm80_traits.h"
#include "core/softmax.h"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm80/work_tile.cuh"

namespace flashcore::cuda::sm80 {

/// How an element of K and V is stored, and the type products are computed in. Codes are exact in
/// f16, and become it in fewer instructions than bf16.
template <typename Element>
struct Storage {
  static constexpr bool kKv8 = false;
  using Type = Element;
  using Operand = Element;
};
template <>
struct Storage<void> {
  static constexpr bool kKv8 = true;
  using Type = std::uint8_t;
  using Operand = __half;
};

/// Element is the type of Q, K, V and the output. void: K and V are stored in 8 bits (kCodes), and
/// their format, Q's (8-bit too, f16 or bf16) and the output's are known at run time.
template <typename Element_, int kHeadDim_, int kTileQ_, int kTileK_, int kStages_, int kWarpRows_,
          int kThreads_>
struct Config {
  using Element = Element_;
  using Stored = typename Storage<Element>::Type;  // of K and V
  using Operand = typename Storage<Element>::Operand;
  static constexpr bool kKv8 = Storage<Element>::kKv8;
  static constexpr core::Sm80Traits kShape{kHeadDim_,  kTileQ_,   kTileK_,       kStages_,
                                           kWarpRows_, kThreads_, sizeof(Stored)};
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kTileQ = kTileQ_;
  static constexpr int kTileK = kTileK_;
  static constexpr int kStages = kStages_;
  static constexpr int kWarpRows = kWarpRows_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarpsM = kShape.warps_m();
  static constexpr int kWarpsN = kShape.warps_n();
  static constexpr int kWarpKeys = kShape.warp_keys();
  // Of which the scores are computed at once, without and with options, which need registers.
  static constexpr int kFastPathKeys = kShape.keys_per_pass();
  static constexpr int kGeneralPathKeys =
      kWarpKeys % 32 == 0 && !(kKv8 && kShape.sm_threads() > 384 && kHeadDim > 64) ? 32 : 16;
  // With few rows the products are transposed (few_rows.cuh): an accumulator tile then has 16 keys
  // or columns of V and 8 rows, else 8 and 16.
  static constexpr bool kSwapAB = kWarpRows == 8;
  static constexpr int kTileWidth = kSwapAB ? 16 : 8;
  static constexpr int kRowTiles = kSwapAB ? 1 : kWarpRows / 16;  // accumulator tiles below others
  static constexpr int kColumnTiles = kHeadDim / kTileWidth;      // and beside others, of output
  static constexpr int kSteps = kHeadDim / 16;                    // k-steps of Q K^T
  static constexpr bool kWarpPrivateKv = kShape.warp_private_kv();
  static constexpr bool kQInRegisters = kShape.q_in_registers();
  static constexpr int kMinBlocks = kShape.blocks_per_sm();
  using QueryTile = core::SwizzledTile<kTileQ, kHeadDim>;
  // Of K and of V, counted in 16-bit elements: two codes are one.
  using KeyTile = core::SwizzledTile<kTileK, kHeadDim * sizeof(Stored) / 2>;
  static_assert(kWarpsM * kWarpsN * 32 == kThreads && kWarpKeys % 16 == 0 && kHeadDim % 32 == 0 &&
                !(kSwapAB && kKv8));
  /// A thread has two rows of an accumulator tile: the registers of row `half`, of i = 0, 1.
  static constexpr __device__ int reg_of(int half, int i) {
    return kSwapAB ? half + 2 * i : 2 * half + i;
  }
};

template <int... kShape>
using Kv8Config = Config<void, kShape...>;

/// use(T()) with the 16-bit type of Q, the output or the bias: the kernel's own, or what `element`
/// says where it has none.
template <typename C, typename Use>
__device__ __forceinline__ void with_element(core::Element element, Use use) {
  if constexpr (!C::kKv8) {
    use(typename C::Element());
  } else if (element == core::Element::f16) {
    use(__half());
  } else {
    use(__nv_bfloat16());
  }
}

/// What a block passes around when its loop is over. Rows of o are padded so that the lanes of a
/// warp write to different banks.
template <typename C>
struct Results {
  float acc_o[C::kWarpsN][C::kTileQ][C::kHeadDim + 8];
  core::SoftmaxState<float> state[C::kWarpsN][C::kTileQ];
};

/// A thread's softmax states, of its row `half` of accumulator tile m. A row's sum is spread over
/// the lanes that have some of its scores until the end. They are looked at once per step: in
/// registers they would displace scores.
template <typename C>
struct alignas(16) RowStats {
  core::SoftmaxState<float> of[C::kRowTiles][2];
};

/// What the products of 8-bit tensors are multiplied by.
template <typename C, bool kKv8 = C::kKv8>
struct Kv8Scales {
  alignas(16) float k_of_key[C::kStages][C::kTileK];  // of scores, where keys have scales
  alignas(16) float v_of_key[C::kStages][C::kTileK];  // of probabilities, likewise, in units of v
  float of_row[C::kTileQ];                            // of scores: everything else
  float v_unit_inverse;
  float of_output;
};
template <typename C>
struct Kv8Scales<C, false> {};

template <typename C>
struct alignas(128) SharedStorage : Kv8Scales<C> {
  using Operand = typename C::Operand;
  using Stored = typename C::Stored;
  static constexpr int kKeyElements = C::kTileK * C::kHeadDim;
  union {
    struct {
      alignas(128) Operand q[C::QueryTile::kElements];
      alignas(128) Stored k[C::kStages][kKeyElements];
      alignas(128) Stored v[C::kStages][kKeyElements];
    };
    Results<C> results;
  };
  RowStats<C> states[C::kSwapAB ? 1 : C::kThreads];  // those of few rows stay in registers
  WarpKeys warp_keys[C::kWarpsM];
  WorkTile item;
  bool last;  // of the blocks of an item
};

/// A thread's place in its block and in the fragments of its warp.
template <typename C>
struct Thread {
  int lane, warp_m, warp_n;

  __device__ __forceinline__ explicit Thread(int index) {
    const int warp = index / 32;
    lane = index % 32;
    warp_m = warp % C::kWarpsM;
    warp_n = warp / C::kWarpsM;
  }
  /// Row of the tile that registers reg_of(half, …) of accumulator tile m belong to.
  __device__ __forceinline__ int row(int m, int half) const {
    const core::Coordinate c = core::mma_c(lane, C::reg_of(half, 0));
    return warp_m * C::kWarpRows + 16 * m + (C::kSwapAB ? c.column : c.row);
  }
  /// Column of register reg of accumulator tile n: a key or a column of V.
  __device__ __forceinline__ int column(int n, int reg) const {
    const core::Coordinate c = core::mma_c(lane, reg);
    return C::kTileWidth * n + (C::kSwapAB ? c.row : c.column);
  }
  /// Of the lanes that share its rows, the first one.
  __device__ __forceinline__ bool is_row_leader() const {
    return C::kSwapAB ? lane < 4 : lane % 4 == 0;
  }
};

/// The largest value and the sum over the lanes that share a thread's rows.
template <typename C>
__device__ __forceinline__ float row_reduce_max(float x) {
  return C::kSwapAB ? cross_quad_max(x) : quad_max(x);
}
template <typename C>
__device__ __forceinline__ float row_reduce_sum(float x) {
  return C::kSwapAB ? cross_quad_sum(x) : quad_sum(x);
}

// Accumulators of a warp: the scores of kKeys keys and the output.
template <typename C, int kKeys>
using AccS = float[C::kRowTiles][kKeys / C::kTileWidth][4];
template <typename C>
using AccO = float[C::kRowTiles][C::kColumnTiles][4];

}  // namespace flashcore::cuda::sm80
