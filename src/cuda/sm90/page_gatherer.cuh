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
    if (tile == work.first_tile) look_up(next, work, tile);
    const AttentionParams& p = this->params.call;
    copy_rows(this->s.k[state.stage()], p.k, p.k_strides, work, tile, next);
    defer_arrival(this->s.template barrier<Sm90Barrier::k_full>(state.stage()));
    // The page table's latency passes during the next tile of V.
    look_up(next, work, tile + 1);
  }

  __device__ __forceinline__ void load_v(TileQueueState queue,
                                         typename Pipeline::LoadedVState state, std::int32_t tile) {
    const WorkTile& work = this->work(queue);
    const AttentionParams& p = this->params.call;
    core::KvLocation pages[Gather::kLookups];
    look_up(pages, work, tile);  // in the L1 cache since K was loaded
    copy_rows(this->v_tile(state), p.v, p.v_strides, work, tile, pages);
    defer_arrival(this->s.template barrier<Pipeline::kLoadedVFull>(state.stage()));
  }

  /// Waits for all copies of the warp, and arrives.
  __device__ __forceinline__ void finish_loads() {
    if (deferred == nullptr) return;
    finish<0>();
    deferred = nullptr;
  }

 private:
  using Pages = core::KvLocation[Gather::kLookups];
  Pages next;                         // of the K tile that is loaded next; not checked yet
  std::uint64_t* deferred = nullptr;  // the barrier of the tile whose copies are in flight

  __device__ __forceinline__ void look_up(Pages& pages, const WorkTile& work,
                                          std::int32_t tile) const {
#pragma unroll
    for (int i = 0; i < Gather::kLookups; ++i) {
      const int row = Gather::looked_up_row(this->rank, this->lane, i);
      pages[i] = this->find(work, tile * C::kTileK + row);
    }
  }

  /// Issues the copies of the warp's rows with keys of the sequence. The rest of the tile keeps its
  /// old content, as in PagedProducer. pages: of the rows that the lane has looked up.
  __device__ __forceinline__ void copy_rows(unsigned char* s_tile, const void* g_tensor,
                                            const core::Strides& strides, const WorkTile& work,
                                            std::int32_t tile, const Pages& pages) const {
    using T = typename C::Element;
    const int lane = this->lane;
    const T* g_head = static_cast<const T*>(g_tensor) + work.kv_head * strides.head;
    const int keys = min(work.seq.kv_len - tile * C::kTileK, C::kTileK);
    const std::uint32_t s_rows = shared_address(s_tile);
#pragma unroll
    for (int lookup = 0; lookup < Gather::kLookups; ++lookup) {
      const core::KvLocation at = this->row_map(work).checked(pages[lookup]);
      const auto g_row = reinterpret_cast<std::uint64_t>(
          g_head + (at.block * strides.batch + at.row * strides.row));
      const int end = min(Gather::kCopiesOfLookup * (lookup + 1), Gather::kCopies);
#pragma unroll 2
      for (int copy = Gather::kCopiesOfLookup * lookup; copy < end; ++copy) {
        const std::uint64_t g_copied =
            __shfl_sync(0xffffffffu, g_row, Gather::source_lane(lane, copy));
        const int row = Gather::copied_row(this->rank, lane, copy);
        if (row < keys) copy_row(s_rows, row, g_copied);
      }
    }
    cp_async_commit();
  }

  /// The lane's chunk of all panels of a row.
  __device__ __forceinline__ void copy_row(std::uint32_t s_rows, int row,
                                           std::uint64_t g_row) const {
    const int first = Gather::kChunkBytes * (this->lane % Gather::kLanesOfRow);
    const std::uint32_t s_to = s_rows + KvTile::offset(row, first / C::kElementBytes);
#pragma unroll
    for (int panel = 0; panel < KvTile::kPanels; ++panel) {
      const int begin = panel * core::kPanelRowBytes;
      if (begin + first < kRowBytes) {
        cp_async_16(s_to + panel * KvTile::kPanelBytes,
                    reinterpret_cast<const void*>(g_row + begin + first));
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
