// Compile-time configuration of a Hopper kernel, its shared memory, and the map from threads to
// accumulator elements.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "core/mma_layout.h"
#include "core/seq_info.h"
#include "core/sm90_roles.h"
#include "core/softmax.h"
#include "core/step_schedule.h"
#include "core/wgmma_layout.h"
#include "cuda/primitives/compiler.cuh"
#include "cuda/primitives/wgmma.cuh"
#include "cuda/sm90/params.h"

namespace flashcore::cuda::sm90 {

using core::AttentionParams;
using core::InjectedFault;
using core::kTileSlots;
using core::Sm90Barrier;
using core::TileQueueState;

/// What a consumer warp is compiled for. A kernel with fewer paths is faster: ptxas schedules and
/// places the code of a path differently when there is more of it.
enum class Path {
  plain,           // scores are only scaled and masked by position, the output has 16 bits
  fast,            // any output
  masked,          // and a boolean mask
  general,         // score modifications
  general_masked,  // and a boolean mask
  biased,          // a bias that is staged in shared memory, and no other score modification
  general_biased,  // a bias, a boolean mask and score modifications
};
constexpr bool is_biased(Path path) { return path == Path::biased || path == Path::general_biased; }
constexpr bool is_fast(Path path) {
  return path == Path::plain || path == Path::fast || path == Path::masked;
}
constexpr bool is_masked(Path path) { return path == Path::masked || path == Path::general_masked; }

/// kFp8: q, k, v and P are e4m3; Element is the type of the output.
template <typename Element_, int kHeadDim_, int kTileQ_, int kTileK_, int kStages_, int kWarpRows,
          int kThreads_, bool kFp8_ = false>
struct Config {
  using Element = Element_;
  using Operand = std::conditional_t<kFp8_, E4m3, Element>;
  static constexpr bool kFp8 = kFp8_;
  static constexpr int kElementBytes = kFp8 ? 1 : 2;
  static constexpr core::Sm90Traits kShape{kHeadDim_, kTileQ_, kTileK_, kStages_, kElementBytes};
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kTileQ = kTileQ_;
  static constexpr int kTileK = kTileK_;
  static constexpr int kStages = kStages_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kConsumers = kShape.consumers();  // warpgroups
  static constexpr int kConsumerRegisters = kShape.consumer_registers();
  static constexpr int kProducerRegisters = kShape.producer_registers();
  using Pipeline = core::Sm90Pipeline<kShape>;
  static constexpr core::StepSchedule kSchedule =
      core::schedule_for(kFp8, kHeadDim, kTileQ, kTileK);
  static_assert(!kSchedule.ping_pong || (!kFp8 && kConsumers > 1));

  // Shared memory tiles, 128B swizzle.
  using QueryTile = core::PanelTile<core::kQTileRows, kHeadDim, kElementBytes>;  // [64, head_dim]
  using KeyTile =
      core::PanelTile<kTileK, kHeadDim, kElementBytes>;  // K, loaded V: [tile_k, head_dim]
  using ValueTile =                                      // V of the GEMM; fp8: transposed
      std::conditional_t<kFp8, core::PanelTile<kHeadDim, kTileK, 1>, KeyTile>;
  static constexpr int kQStages = kShape.q_stages();
  static constexpr int kQTilesPerBarrier = kShape.q_tiles_per_stage();
  static constexpr int kVStagingStages = kShape.v_staging_stages();
  static constexpr int kPvSliceColumns = kConsumers == 3 ? 64 : 128;  // fp8: of one P V accumulator
  static constexpr int kTransposers = kShape.transposers();           // warps
  static constexpr int kPageProducers = kShape.page_producers();      // warps
  static constexpr bool kGathersPages = kShape.gathers_pages();
  static constexpr int kGemmSteps =
      kHeadDim * kElementBytes / core::kStepBytes;  // k-steps of Q K^T
  // P is kept times 2^kPScaleLog2: e4m3 then has as many powers of two below it as it can.
  static constexpr float kPScaleLog2 = kFp8 ? 8.f : 0.f;
  // O is rescaled only when the row maximum grows by more than this factor. P then exceeds 1, which
  // 16-bit formats can hold.
  static constexpr float kRescaleThresholdLog2 = kFp8 ? 0.f : 8.f;
  static constexpr bool kPackGqa = kShape.packs_gqa();
  static constexpr bool kKeyRanges = false;
  static constexpr bool kTakesMask = kShape.takes_mask();
  static constexpr bool kTakesBias = kShape.takes_bias();
  static constexpr bool kAddsAlibi = kShape.adds_alibi();
  static constexpr bool kCapsExponents = kShape.caps_exponents() && !kShape.caps_in_own_kernel();
  // One register fewer in the loop of core::consume, but other, mostly slower code.
  static constexpr bool kRecountsTile = false;
  static_assert(kThreads == kShape.threads() && kWarpRows == 16 && kTileK % 16 == 0);
};

/// The kernel for calls with key ranges, which excludes tail splits (core/key_ranges.h).
template <typename C>
struct RangesConfig : C {
  static constexpr bool kKeyRanges = true;
  // Neither is batch-invariant: the rows of a warp decide together.
  static constexpr bool kAddsAlibi = false;
  static constexpr bool kCapsExponents = false;
};

/// The kernel for calls with a softcap. Without kRecountsTile or the path for ALiBi it would spill.
template <typename C>
struct SoftcapConfig : C {
  static constexpr bool kRecountsTile = true;
  static constexpr bool kCapsExponents = true;
};

template <typename Element, int kHeadDim, int kTileQ, int kTileK, int kStages, int kWarpRows,
          int kThreads>
using Fp8Config = Config<Element, kHeadDim, kTileQ, kTileK, kStages, kWarpRows, kThreads, true>;

/// The queries of a work tile: rows of one head, or of several that share K and V (PackGQA).
struct TileQueries {
  core::SeqInfo seq;
  core::MaskEdges edges;     // of its queries
  std::int32_t b, head;      // the first head
  std::int32_t first_query;  // of each head
  // Coordinates in the tensor maps. The scheduler finds them: the producer has few registers.
  std::int32_t q_batch, k_batch, kv_head;
  float alibi_slopes[core::kMaxHeadsInTile];  // of its heads, if the call has slopes
};

struct alignas(16) WorkTile : TileQueries, core::TileSteps {
  std::int32_t tail_split;  // < 0: the whole tile; with key ranges, the range, counted from 0
  std::int32_t tail_index;  // of the tile, among those that are split
  std::int32_t ranges;      // key ranges of the tile, if the kernel has them
};

template <typename C>
struct Tiles {
  unsigned char q[C::kQStages][C::QueryTile::kBytes];  // [kQStages][64, head_dim]
  unsigned char k[C::kStages][C::KeyTile::kBytes];     // [kStages][tile_k, head_dim]
  unsigned char v[C::kStages]
                 [C::ValueTile::kBytes];  // [kStages][tile_k, head_dim]; fp8: transposed
};

template <typename C>
struct Fp8Tiles : Tiles<C> {
  unsigned char v_staging[C::kVStagingStages][C::KeyTile::kBytes];  // [stages][tile_k, head_dim]
  float score_scale[kTileSlots], output_scale[kTileSlots];  // per-head scales of the work tile
};

template <typename C>
struct alignas(1024) SharedStorage : std::conditional_t<C::kFp8, Fp8Tiles<C>, Tiles<C>> {
  std::uint64_t barriers[core::mbarrier_count(C::kShape)];  // core/sm90_pipeline.h
  WorkTile work_tiles[kTileSlots];
  core::SoftmaxState<float> final_stats[C::kTileQ];  // rows of the work tile whose last P V runs

  template <Sm90Barrier kBarrier>
  __device__ __forceinline__ std::uint64_t& barrier(std::uint32_t slot) {
    constexpr int kFirst = core::first_mbarrier(C::kShape, kBarrier);
    return barriers[kFirst + slot];
  }
};

/// True if a staged bias fits behind the SharedStorage.
template <typename C>
constexpr bool fits_staged_bias() {
  return C::kTakesBias && C::kShape.staged_bias_bytes(sizeof(SharedStorage<C>)) > 0;
}

// A thread's accumulators of S [64, tile_k] and O [64, head_dim]. Register 4 n + 2 half + i is
// column 8 n + 2 (lane % 4) + i of row lane / 4 + 8 half of the warp's 16 rows.
template <typename C>
using AccS = float[C::kTileK / 2];
template <typename C>
using AccO = float[C::kHeadDim / 2];

/// A consumer thread's position in the tile.
template <typename C>
struct Thread {
  int group, lane, warp;                 // consumer warpgroup; warp of the warpgroup
  std::int32_t first_head, first_query;  // PackGQA: of its first row, relative to the tile's

  __device__ __forceinline__ explicit Thread(int index, core::PackGqa heads = {}) {
    group = warp_uniform(index / 128) - 1;
    warp = index / 32 % 4;
    lane = index % 32;
    if (C::kPackGqa) {
      first_head = heads.head(row(0));
      first_query = heads.query(row(0));
    }
  }
  __device__ __forceinline__ int row(int half) const {
    return 64 * group + 16 * warp + core::mma_c(lane, 2 * half).row;
  }
  __device__ __forceinline__ int column(int n, int i) const {
    return 8 * n + core::mma_c(lane, i).column;
  }
};

// A thread's row. Both rows of a thread have one head, as have all 16 rows of a warp.
template <typename C>
__device__ __forceinline__ std::int32_t head_of(const WorkTile& work, const Thread<C>& t) {
  return C::kPackGqa ? work.head + t.first_head : work.head;
}
template <typename C>
__device__ __forceinline__ std::int32_t query_in_tile(const Thread<C>& t, int half) {
  return C::kPackGqa ? t.first_query + 8 * half : t.row(half);
}
template <typename C>
__device__ __forceinline__ std::int32_t query_of(const WorkTile& work, const Thread<C>& t,
                                                 int half) {
  return work.first_query + query_in_tile(t, half);
}
template <typename C>
__device__ __forceinline__ bool has_row(const WorkTile& work, const Thread<C>& t, int half) {
  return query_in_tile(t, half) < work.queries;
}

}  // namespace flashcore::cuda::sm90
