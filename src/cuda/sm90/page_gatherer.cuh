// The producers of KV pages with few keys (core::produce). A TMA box of one row would take a warp
// as long as one of 32, so cp.async copies the rows (core/page_gather.h) to where TMA would.
#pragma once

#include "core/page_gather.h"
#include "cuda/primitives/cp_async.cuh"
#include "cuda/sm90/paged_producer.cuh"

namespace flashcore::cuda::sm90 {

/// One of the warps. It arrives for a tile when it has issued the copies of the next one, so that
/// two tiles are in flight; before it blocks, it waits for its copies and arrives
/// (core::wait_to_load).
template <typename C>
struct PageGatherer : PageLoader<C> {
  using Pipeline = typename C::Pipeline;
  using KvTile = typename C::KeyTile;
  using Gather = core::PageGather<C::kTileK, C::kPageProducers>;
  static constexpr bool kDefersArrivals = true;
  static constexpr int kRowBytes = C::kHeadDim * C::kElementBytes;

  __device__ __forceinline__ PageGatherer(SharedStorage<C>& s, const Params& params, int rank)
      : PageLoader<C>(s, params, rank) {}

  /// The same for all lanes: they go on together.
  template <Sm90Barrier kBarrier, typename State>
  __device__ __forceinline__ bool test_wait(const State& state) const {
    return __all_sync(0xffffffffu, PageLoader<C>::template test_wait<kBarrier>(state)) != 0;
  }

  __device__ __forceinline__ void load_k(TileQueueState queue, typename Pipeline::KvState state,
                                         std::int32_t tile) {
    const WorkTile& work = this->work(queue);
    if (tile == work.first_tile) look_up(work, tile);
    const AttentionParams& p = this->params.call;
    copy_rows(this->s.k[state.stage()], p.k, p.k_strides, work, tile,
              [&](int lookup) { return pages[lookup]; });
    defer_arrival(this->s.template barrier<Sm90Barrier::k_full>(state.stage()));
    // The page table's latency passes during the next tile of V.
    look_up(work, tile + 1);
  }

  __device__ __forceinline__ void load_v(TileQueueState queue,
                                         typename Pipeline::LoadedVState state, std::int32_t tile) {
    const WorkTile& work = this->work(queue);
    const AttentionParams& p = this->params.call;
    // The pages are in the L1 cache since K was loaded.
    copy_rows(this->v_tile(state), p.v, p.v_strides, work, tile,
              [&](int lookup) { return find(work, tile, lookup); });
    defer_arrival(this->s.template barrier<Pipeline::kLoadedVFull>(state.stage()));
  }

  /// Waits for all copies of the warp, and arrives.
  __device__ __forceinline__ void finish_loads() {
    if (deferred == nullptr) return;
    finish<0>();
    deferred = nullptr;
  }

 private:
  core::KvLocation pages[Gather::kLookups];  // of the K tile that is loaded next
  std::uint64_t* deferred = nullptr;         // the barrier of the tile whose copies are in flight

  __device__ __forceinline__ core::KvLocation find(const WorkTile& work, std::int32_t tile,
                                                   int lookup) const {
    const int row = Gather::looked_up_row(this->rank, this->lane, lookup);
    return this->location_of(work, tile * C::kTileK + row);
  }
  __device__ __forceinline__ void look_up(const WorkTile& work, std::int32_t tile) {
#pragma unroll
    for (int i = 0; i < Gather::kLookups; ++i) pages[i] = find(work, tile, i);
  }

  /// Issues the copies of the warp's rows with keys of the sequence. The rest of the tile keeps its
  /// old content, as in PagedProducer. location_of(lookup): of a row that the lane has looked up.
  template <typename LocationOf>
  __device__ __forceinline__ void copy_rows(unsigned char* s_tile, const void* g_tensor,
                                            const core::Strides& strides, const WorkTile& work,
                                            std::int32_t tile, LocationOf location_of) const {
    using T = typename C::Element;
    const int lane = this->lane, chunk = lane % Gather::kLanesOfRow;
    const char* g_chunk = reinterpret_cast<const char*>(static_cast<const T*>(g_tensor) +
                                                        work.kv_head * strides.head) +
                          Gather::kChunkBytes * chunk;
    const int keys = min(work.seq.kv_len - tile * C::kTileK, C::kTileK);
    const std::uint32_t s_rows = shared_address(s_tile);
#pragma unroll
    for (int lookup = 0; lookup < Gather::kLookups; ++lookup) {
      const core::KvLocation at = location_of(lookup);
      const std::int64_t offset = at.block * strides.batch + at.row * strides.row;
      const int end = min(Gather::kCopiesOfLookup * (lookup + 1), Gather::kCopies);
#pragma unroll 2
      for (int copy = Gather::kCopiesOfLookup * lookup; copy < end; ++copy) {
        const std::int64_t of_row =
            __shfl_sync(0xffffffffu, offset, Gather::source_lane(lane, copy));
        const int row = Gather::copied_row(this->rank, lane, copy);
        if (row < keys) {
          copy_row(s_rows + KvTile::offset(row, chunk * Gather::kChunkBytes / sizeof(T)),
                   g_chunk + of_row * static_cast<std::int64_t>(sizeof(T)), chunk);
        }
      }
    }
    cp_async_commit();
  }

  /// The lane's chunk of all panels of a row.
  static __device__ __forceinline__ void copy_row(std::uint32_t s_to, const char* g_from,
                                                  int chunk) {
#pragma unroll
    for (int panel = 0; panel < KvTile::kPanels; ++panel) {
      const int begin = panel * core::kPanelRowBytes;
      if (begin + Gather::kChunkBytes * chunk < kRowBytes) {
        cp_async_16(s_to + panel * KvTile::kPanelBytes, g_from + begin);
      }
    }
  }

  /// Arrives for the tile before.
  __device__ __forceinline__ void defer_arrival(std::uint64_t& s_full) {
    if (deferred != nullptr) finish<1>();
    deferred = &s_full;
  }

  /// Waits until kPending tiles are in flight, and arrives for the deferred one. wgmma reads shared
  /// memory through the async proxy.
  template <int kPending>
  __device__ __forceinline__ void finish() const {
    cp_async_wait<kPending>();
    fence_async_proxy();
    arrive_once_per_warp(*deferred, this->lane);
  }
};

}  // namespace flashcore::cuda::sm90
