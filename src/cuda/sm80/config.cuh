// Compile-time configuration of an sm80 kernel, its shared memory, and the map from threads to
// accumulator elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "core/dequant_f16.h"
#include "core/mma_layout.h"
#include "core/sm80_traits.h"
#include "core/softmax.h"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm80/work_tile.cuh"

namespace flashcore::cuda::sm80 {

/// Stored type of K and V, and type of the MMA operands. 8-bit K/V become f16: every value is
/// exact in it, and the conversion takes fewer instructions than to bf16.
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

/// Element is the type of Q, K, V and the output. void: K and V are 8-bit (kKv8), and their format,
/// Q's (8-bit, f16 or bf16) and the output's are known at run time.
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
  static constexpr int kKeysPerPass = kShape.keys_per_pass();  // of a mainloop step
  // Up to 8 rows: the MMAs swap their operands (mma.cuh). An accumulator tile then has 16 keys or
  // columns of V and 8 rows, otherwise 8 and 16.
  static constexpr bool kSwapAB = kWarpRows == 8;
  static constexpr int kTileWidth = kSwapAB ? 16 : 8;
  static constexpr int kRowTiles = kSwapAB ? 1 : kWarpRows / 16;  // accumulator tiles along rows
  static constexpr int kColumnTiles = kHeadDim / kTileWidth;      // and along columns of O
  static constexpr int kGemmSteps = kHeadDim / 16;                // k-steps of Q K^T
  static constexpr bool kWarpPrivateKv = kShape.warp_private_kv();
  static constexpr bool kQInRegisters = kShape.q_in_registers();
  static constexpr bool kLargeTile = core::is_large_tile(kTileQ);
  using MaskRow = std::conditional_t<kLargeTile, std::int32_t, std::int64_t>;
  // Words of a row's mask bits in a pass (mask_words.cuh, boolean_mask.cuh).
  static constexpr int kMaskWords = kLargeTile ? 1 : (kKeysPerPass + 31) / 32;
  // The mask is read before the wait for K.
  static constexpr bool kEarlyMask = !kLargeTile && kKeysPerPass == kWarpKeys;
  /// True if rows may be shorter than kHeadDim.
  template <bool kFastPath>
  static constexpr bool kAnyDim = !kFastPath || kLargeTile;
  /// True if the path reads boolean masks.
  template <bool kFastPath>
  static constexpr bool kReadsMask = !kFastPath || kLargeTile;
  /// True if the path has steps for tiles without masks (plain_steps.cuh).
  template <bool kFastPath>
  static constexpr bool kHasPlainSteps =
      kLargeTile&& kFastPath && !kKv8 && !kQInRegisters && kWarpsN == 1 && kStages == 1;
  static constexpr int kMinCtas = kShape.blocks_per_sm();  // per SM
  using QueryTile = core::SwizzledTile<kTileQ, kHeadDim>;
  // K and V in units of 16 bits: two 8-bit elements are one unit.
  using KeyTile = core::SwizzledTile<kTileK, kHeadDim * sizeof(Stored) / 2>;
  static_assert(kWarpsM * kWarpsN * 32 == kThreads && kWarpKeys % 16 == 0 && kHeadDim % 32 == 0 &&
                !(kSwapAB && kKv8));
  /// Registers i = 0, 1 of row `half` of a thread's two rows of an accumulator tile.
  static constexpr __device__ int reg_of(int half, int i) {
    return kSwapAB ? half + 2 * i : 2 * half + i;
  }
  static constexpr int kLanesOfRow = kSwapAB ? 8 : 4;
  /// Keys from register reg_of(half, 0) to reg_of(half, i).
  static constexpr __device__ int column_step(int i) { return kSwapAB ? 8 * i : i; }
};

/// The kernel of small tiles for calls whose only option is a boolean mask: the fast path, with the
/// mask.
template <typename C>
struct MaskConfig : C {
  // Several words of a row need the registers of Q where a thread has 128.
  static constexpr bool kQInRegisters =
      C::kQInRegisters && (C::kMaskWords == 1 || C::kThreads * C::kMinCtas <= 384);
  template <bool>
  static constexpr bool kReadsMask = true;
};

template <int... kShape>
using Kv8Config = Config<void, kShape...>;

/// use(T()) with the 16-bit type of Q, the output or the bias: the kernel's Element, or the type
/// `element` names in kernels for 8-bit K/V.
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

/// The warps' unnormalized outputs and row statistics, after the mainloop. Rows of O are padded, so
/// that the lanes of a warp write to different banks.
template <typename C>
struct StagedOutput {
  float acc_o[C::kWarpsN][C::kTileQ][C::kHeadDim + 8];         // [warps_n][tile_q, head_dim + 8]
  core::SoftmaxState<float> row_stats[C::kWarpsN][C::kTileQ];  // [warps_n][tile_q]
};

/// Row statistics of a thread: of its row `half` of accumulator tile m. Each lane of a row keeps
/// its own partial sum until the epilogue. They live in shared memory: a step reads them once, and
/// in registers they would displace scores.
template <typename C>
struct alignas(16) RowStats {
  core::SoftmaxState<float> of[C::kRowTiles][2];
};

/// Scales of 8-bit tensors.
template <typename C, bool kKv8 = C::kKv8>
struct Kv8Scales {
  alignas(16) float k_scale[C::kStages][C::kTileK];  // [kStages][tile_k], if per block
  alignas(16) float v_scale[C::kStages][C::kTileK];  // [kStages][tile_k], if per block
  float row_scale[C::kTileQ];                        // [tile_q]: every other factor of the scores
  float v_unit_inverse;                              // v_scale is folded into P in these units
  float output_scale;
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
      alignas(128) Operand q[C::QueryTile::kElements];  // [tile_q, head_dim], swizzled
      alignas(128) Stored k[C::kStages][kKeyElements];  // [kStages][tile_k, head_dim], swizzled
      alignas(128) Stored v[C::kStages][kKeyElements];  // [kStages][tile_k, head_dim], swizzled
    };
    StagedOutput<C> staged;
  };
  RowStats<C> row_stats[C::kSwapAB ? 1 : C::kThreads];  // [threads]; swap-AB: in registers
  WarpKeys warp_keys[C::kWarpsM];                       // [warps_m]
  typename C::MaskRow mask_rows[C::kTileQ];             // [tile_q], if the call has a mask
  float slopes[C::kTileQ];                              // [tile_q], if the call has ALiBi slopes
  WorkTile work;
  std::int32_t plain_end;  // no plain step begins here or behind (plain_steps.cuh)
  bool last;               // this CTA is the last of the work tile
};

/// A thread's position in its CTA and in the fragments of its warp.
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
  /// Index of the thread among the lanes that share its rows.
  __device__ __forceinline__ int row_lane() const { return C::kSwapAB ? lane / 4 : lane % 4; }
  /// True for the first of them.
  __device__ __forceinline__ bool is_row_leader() const { return row_lane() == 0; }
};

/// Reductions over the lanes that share a thread's rows.
template <typename C>
__device__ __forceinline__ float row_reduce_max(float x) {
  return C::kSwapAB ? cross_quad_max(x) : quad_max(x);
}
template <typename C>
__device__ __forceinline__ float row_reduce_sum(float x) {
  return C::kSwapAB ? cross_quad_sum(x) : quad_sum(x);
}

// A thread's accumulators of S [warp_rows, kKeys] and O [warp_rows, head_dim].
template <typename C, int kKeys>
using AccS = float[C::kRowTiles][kKeys / C::kTileWidth][4];
template <typename C>
using AccO = float[C::kRowTiles][C::kColumnTiles][4];

}  // namespace flashcore::cuda::sm80
