// The shape of a Hopper kernel, what its block keeps in shared memory, and the barriers there.
#pragma once

#include <cuda_runtime.h>

#include "core/mma_layout.h"
#include "core/seq_info.h"
#include "core/sm90_roles.h"
#include "core/softmax.h"
#include "core/step_schedule.h"
#include "core/wgmma_layout.h"
#include "cuda/primitives/hopper.cuh"
#include "cuda/primitives/wgmma.cuh"
#include "cuda/sm90/params.h"

namespace flashcore::cuda::sm90 {

using core::AttentionParams;
using core::InjectedFault;
using core::kTileSlots;
using core::Sm90Barrier;
using core::TileQueueState;

template <bool kFirst, typename A, typename B>
struct Chosen {
  using Type = A;
};
template <typename A, typename B>
struct Chosen<false, A, B> {
  using Type = B;
};
/// The first of two types, or the second.
template <bool kFirst, typename A, typename B>
using Either = typename Chosen<kFirst, A, B>::Type;

/// kCodes: q, k and v are e4m3, and so are probabilities; Element is then the output's alone.
template <typename Element_, int kHeadDim_, int kTileQ_, int kTileK_, int kStages_, int kWarpRows,
          int kThreads_, bool kCodes_ = false>
struct Config {
  using Element = Element_;
  using Operand = Either<kCodes_, E4m3, Element>;
  static constexpr bool kFp8 = kCodes_;
  static constexpr int kElementBytes = kFp8 ? 1 : 2;
  static constexpr core::Sm90Traits kShape{kHeadDim_, kTileQ_, kTileK_, kStages_, kElementBytes};
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kTileQ = kTileQ_;
  static constexpr int kTileK = kTileK_;
  static constexpr int kStages = kStages_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kConsumers = kShape.consumers();
  static constexpr int kConsumerRegisters = kShape.consumer_registers();
  static constexpr int kProducerRegisters = kShape.producer_registers();
  using Pipeline = core::Sm90Pipeline<kShape>;
  static constexpr core::StepSchedule kSchedule =
      core::schedule_for(kFp8, kHeadDim, kTileQ, kTileK);
  static_assert(!kSchedule.ping_pong || (!kFp8 && kConsumers > 1));
  using QueryTile = core::PanelTile<core::kQTileRows, kHeadDim, kElementBytes>;  // one piece
  using KeyTile = core::PanelTile<kTileK, kHeadDim, kElementBytes>;  // of K, and of V as it comes
  using ValueTile =                                                  // of V as products read it
      Either<kFp8, core::PanelTile<kHeadDim, kTileK, 1>, KeyTile>;
  static constexpr int kQStages = kShape.q_stages();
  static constexpr int kQTilesPerBarrier = kShape.q_tiles_per_stage();
  static constexpr int kVStagingStages = kShape.v_staging_stages();
  // Columns of P V that have accumulators of their own at a time, where they are codes.
  static constexpr int kPartColumns = kConsumers == 3 ? 64 : 128;
  static constexpr int kTransposers = kShape.transposers();                          // warps
  static constexpr int kProductSteps = kHeadDim * kElementBytes / core::kStepBytes;  // of Q K^T
  // Probabilities are kept times 2^kPScaleLog2: e4m3 then has as many powers of two below
  // them as it can. A maximum that grows by no more than 2^kRescaleThresholdLog2 may wait: P then
  // exceeds what it should be at most, which 16-bit formats do not mind, and the output need not be
  // rescaled.
  static constexpr float kPScaleLog2 = kFp8 ? 8.f : 0.f;
  static constexpr float kRescaleThresholdLog2 = kFp8 ? 0.f : 8.f;
  static constexpr bool kPackGqa = kShape.packs_gqa();
  static_assert(kThreads == kShape.threads() && kWarpRows == 16 && kTileK % 16 == 0);
};

template <typename Element, int kHeadDim, int kTileQ, int kTileK, int kStages, int kWarpRows,
          int kThreads>
using Fp8Config = Config<Element, kHeadDim, kTileQ, kTileK, kStages, kWarpRows, kThreads, true>;

/// Which queries an item has: of one head, or of some that share K and V.
struct ItemQueries {
  core::SeqInfo seq;
  core::MaskEdges edges;     // of its queries
  std::int32_t b, head;      // the first one
  std::int32_t first_query;  // of each head
  // Where its tiles are in the tensor maps: found here, since the producer has few registers.
  std::int32_t q_batch, k_batch, kv_head;
};

/// What a CTA works on.
struct alignas(16) WorkTile : ItemQueries, core::TileSteps {
  std::int32_t part, cut_item;  // of an item whose keys are cut; part < 0: it is whole
};

template <typename C>
struct Tiles {
  unsigned char q[C::kQStages][C::QueryTile::kBytes];
  unsigned char k[C::kStages][C::KeyTile::kBytes];
  unsigned char v[C::kStages][C::ValueTile::kBytes];
};

/// Those of 8-bit inputs, and what these need besides.
template <typename C>
struct CodeTiles : Tiles<C> {
  unsigned char v_staging[C::kVStagingStages][C::KeyTile::kBytes];
  float score_scale[kTileSlots], output_factor[kTileSlots];  // from the scales of an item's head
};

template <typename C>
struct alignas(1024) SharedStorage : Either<C::kFp8, CodeTiles<C>, Tiles<C>> {
  std::uint64_t barriers[core::mbarrier_count(C::kShape)];  // core/sm90_pipeline.h
  WorkTile items[kTileSlots];
  core::SoftmaxState<float>
      final_stats[C::kTileQ];  // rows of the item whose last product is under way

  template <Sm90Barrier kBarrier>
  __device__ __forceinline__ std::uint64_t& barrier(std::uint32_t slot) {
    constexpr int kFirst = core::first_mbarrier(C::kShape, kBarrier);
    return barriers[kFirst + slot];
  }
};

/// What the warps of all roles have.
template <typename C>
struct RoleWarp {
  using Pipeline = typename C::Pipeline;
  SharedStorage<C>& s;
  const Params& params;

  template <Sm90Barrier kBarrier, typename Place>
  static __device__ __forceinline__ std::uint32_t parity(const Place& place) {
    constexpr bool kEmpty = core::sm90_barrier(C::kShape, kBarrier).empty;
    return core::parity_of_last(core::phases_before(kEmpty, place.round()));
  }
  template <Sm90Barrier kBarrier, typename Place>
  __device__ __forceinline__ void wait(const Place& place) const {
    cuda::wait(s.template barrier<kBarrier>(place.stage()), parity<kBarrier>(place));
  }
  template <Sm90Barrier kBarrier, typename Place>
  __device__ __forceinline__ bool test_wait(const Place& place) const {
    return cuda::test_wait(s.template barrier<kBarrier>(place.stage()), parity<kBarrier>(place));
  }
  __device__ __forceinline__ WorkTile& item(TileQueueState place) const {
    return s.items[place.stage()];
  }
  __device__ __forceinline__ bool has_fault(InjectedFault bug) const {
    return params.call.fault.is(bug);
  }
};

/// One thread plays the role.
template <typename C>
struct RoleThread : RoleWarp<C> {
  template <Sm90Barrier kBarrier, typename Place>
  __device__ __forceinline__ void arrive(const Place& place) const {
    cuda::arrive(this->s.template barrier<kBarrier>(place.stage()));
  }
};

// Accumulators of a thread: the scores of a step and the output. Register 4 n + 2 half + i is
// column 8 n + 2 (lane % 4) + i of row lane / 4 + 8 half of the warp's 16 rows.
template <typename C>
using AccS = float[C::kTileK / 2];
template <typename C>
using AccO = float[C::kHeadDim / 2];

/// From one lane, so that the compiler knows it to be the same in all: what depends on it,
/// operands' descriptors above all, then stays in uniform registers.
__device__ __forceinline__ std::int32_t warp_uniform(std::int32_t x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

/// A thread's place among the rows of its block.
template <typename C>
struct Thread {
  int group, lane, warp;  // of the computing warpgroups; warp of its group
  // Of its first row, counted from the item's; of spread ones only.
  std::int32_t first_head, first_query;
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

// Of a thread's row: its head, which both of its rows have, as all 16 of a warp; its query; and
// whether the item has it.
template <typename C>
__device__ __forceinline__ std::int32_t head_of(const WorkTile& item, const Thread<C>& t) {
  return C::kPackGqa ? item.head + t.first_head : item.head;
}
template <typename C>
__device__ __forceinline__ std::int32_t query_in_item(const Thread<C>& t, int half) {
  return C::kPackGqa ? t.first_query + 8 * half : t.row(half);
}
template <typename C>
__device__ __forceinline__ std::int32_t query_of(const WorkTile& item, const Thread<C>& t,
                                                 int half) {
  return item.first_query + query_in_item(t, half);
}
template <typename C>
__device__ __forceinline__ bool has_row(const WorkTile& item, const Thread<C>& t, int half) {
  return query_in_item(t, half) < item.queries;
}

}  // namespace flashcore::cuda::sm90
