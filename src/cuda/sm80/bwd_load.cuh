// Loads the operands of gradients into swizzled shared memory tiles by cp.async, and the statistics
// of query rows. Rows past a sequence and columns past a tensor become zero: they meet weights of
// 0.
#pragma once

#include "core/row_offset.h"
#include "cuda/primitives/report.cuh"
#include "cuda/sm80/bwd_config.cuh"
#include "cuda/sm80/load.cuh"

namespace flashcore::cuda::sm80 {

/// Rows of one head of q, k, v or dout in global memory.
template <typename T>
struct BwdRows {
  const T* g_first;          // row 0 of the sequence
  std::int64_t row, column;  // strides
  std::int32_t columns;
  bool async;  // cp.async can fetch them
};

template <typename C>
__device__ __forceinline__ BwdRows<typename C::Element> bwd_rows(const void* g_data,
                                                                 const core::Strides& strides,
                                                                 std::int32_t b, std::int32_t h,
                                                                 std::int32_t first_row,
                                                                 std::int32_t columns, bool async) {
  using T = typename C::Element;
  return {static_cast<const T*>(g_data) + core::row_offset(strides, b, h, first_row), strides.row,
          strides.column, columns, async};
}

template <typename C, bool kFastPath>
__device__ __forceinline__ BwdRows<typename C::Element> rows_of_q(const BackwardParams& p,
                                                                  const BwdWork& work,
                                                                  std::int32_t h) {
  return bwd_rows<C>(p.fwd.q, p.fwd.q_strides, work.b, h, work.seq.q_row, p.fwd.head_dim,
                     kFastPath || p.fwd.async_rows);
}
template <typename C, bool kFastPath>
__device__ __forceinline__ BwdRows<typename C::Element> rows_of_dout(const BackwardParams& p,
                                                                     const BwdWork& work,
                                                                     std::int32_t h) {
  return bwd_rows<C>(p.dout, p.dout_strides, work.b, h, work.seq.q_row, p.fwd.v_dim,
                     kFastPath || p.async_dout);
}
template <typename C, bool kFastPath>
__device__ __forceinline__ BwdRows<typename C::Element> rows_of_k(const BackwardParams& p,
                                                                  const BwdWork& work) {
  return bwd_rows<C>(p.fwd.k, p.fwd.k_strides, work.b, work.kv_head, work.seq.k_row, p.fwd.head_dim,
                     kFastPath || p.fwd.async_rows);
}
template <typename C, bool kFastPath>
__device__ __forceinline__ BwdRows<typename C::Element> rows_of_v(const BackwardParams& p,
                                                                  const BwdWork& work) {
  return bwd_rows<C>(p.fwd.v, p.fwd.v_strides, work.b, work.kv_head, work.seq.k_row, p.fwd.v_dim,
                     kFastPath || p.fwd.async_rows);
}

/// The part of a tile that a thread copies.
template <typename C, int kRows>
struct BwdCopies {
  using Tile = core::SwizzledTile<kRows, C::kHeadDim>;
  using Mine = ThreadCopies<Tile, C::kThreads>;
  static constexpr int kMyRows = kRows / Mine::kRowStep;
  static_assert(kRows % Mine::kRowStep == 0);
  // The mask tells the compiler the range.
  const Mine mine{opaque(threadIdx.x) & (C::kThreads - 1)};

  /// The thread's first chunk of a tile that begins at row `first`.
  template <typename T>
  __device__ __forceinline__ const T* first_chunk(const BwdRows<T>& g, std::int32_t first) const {
    return g.g_first + (first + mine.row) * g.row + 8 * mine.chunk;
  }
  template <typename T>
  __device__ __forceinline__ std::uint32_t first_address(T* s_tile) const {
    return shared_address(s_tile) + Tile::offset(mine.row, mine.chunk);
  }
};

/// s_tile [kRows, head_dim] = rows from first_chunk() on, which cp.async can fetch; 0 from row
/// `rows` of them on.
template <typename C, int kRows, typename T>
__device__ __forceinline__ void load_bwd_chunks(T* s_tile, const T* g_chunk,
                                                std::int64_t row_stride, int columns, int rows) {
  using Copies = BwdCopies<C, kRows>;
  using Tile = typename Copies::Tile;
  using Mine = typename Copies::Mine;
  const Copies copies;
  const std::uint32_t s_row = copies.first_address(s_tile);
  if (rows >= kRows && columns == C::kHeadDim) {
#pragma unroll
    for (int n = 0; n < Copies::kMyRows; ++n) {
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        cp_async_16(Mine::nth_row(s_row, n) + panel * Tile::kPanelBytes,
                    g_chunk + panel * Tile::kPanelColumns);
      }
      g_chunk += Mine::kRowStep * row_stride;
    }
    return;
  }
#pragma unroll 1
  for (int n = 0; n < Copies::kMyRows; ++n) {
    const bool valid = copies.mine.row + n * Mine::kRowStep < rows;
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const int left = columns - 8 * (panel * Tile::kPanelChunks + copies.mine.chunk);
      cp_async_16(Mine::nth_row(s_row, n) + panel * Tile::kPanelBytes,
                  g_chunk + panel * Tile::kPanelColumns, valid ? max(min(2 * left, 16), 0) : 0);
    }
    g_chunk += Mine::kRowStep * row_stride;
  }
}

/// s_tile [kRows, head_dim] = rows [first, first + kRows); 0 from row `rows` of them on.
template <typename C, int kRows, bool kFastPath>
__device__ __forceinline__ void load_bwd_tile(typename C::Element* s_tile,
                                              const BwdRows<typename C::Element>& g,
                                              std::int32_t first, int rows) {
  using Copies = BwdCopies<C, kRows>;
  using Tile = typename Copies::Tile;
  using Mine = typename Copies::Mine;
  const Copies copies;
  if constexpr (kFastPath) {
    load_bwd_chunks<C, kRows>(s_tile, copies.first_chunk(g, first), g.row, g.columns, rows);
  } else {
    const std::uint32_t s_row = copies.first_address(s_tile);
    const auto* g_row = g.g_first + (first + copies.mine.row) * g.row;
#pragma unroll 1
    for (int n = 0; n < Copies::kMyRows; ++n) {
      const int columns = copies.mine.row + n * Mine::kRowStep < rows ? g.columns : 0;
#pragma unroll 1
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        copy_chunk(Mine::nth_row(s_row, n) + panel * Tile::kPanelBytes, g_row,
                   panel * Tile::kPanelChunks + copies.mine.chunk, columns, g.column, g.async);
      }
      g_row += Mine::kRowStep * g.row;
    }
  }
}

/// Loads statistics and, if kRanges, visible keys of query rows [first, first + kRows) of head h;
/// rows from `rows` on see no key.
template <typename C, int kRows, bool kRanges>
__device__ __forceinline__ void load_bwd_stats(BwdTiles<C>& s, const BackwardParams& p,
                                               std::int32_t h, std::int32_t first, int rows) {
  const core::AttentionParams& f = p.fwd;
  const BwdWork& work = s.work;
  const int r = threadIdx.x;
  if (r >= kRows) return;
  const bool valid = r < rows;
  const std::int64_t at = core::partial_row(f, work.b, h, work.seq.q_row, valid ? first + r : 0);
  const bool next = f.fault.is(InjectedFault::delta_of_next_row) && r + 1 < rows;
  const bool delta = valid && !f.fault.is(InjectedFault::delta_ignored);
  const auto copy = [&](float* s_to, const void* g_from, std::int64_t i, bool given) {
    const auto* g_value = static_cast<const float*>(g_from) + (given ? i : 0);
    cp_async_4(shared_address(s_to + r), g_value, given ? 4 : 0);
  };
  copy(s.base, p.row_base, at, valid);
  copy(s.factor, p.row_factor, at, valid);
  copy(s.delta, p.row_delta, at + (next ? 1 : 0), delta);
  if constexpr (kRanges) {
    s.range[r] = valid ? core::visible_keys(work.seq.mask, first + r) : KeyRange{0, 0};
  }
}

/// Queries that see the tile's keys, of the heads of the group.
template <typename C>
__device__ __forceinline__ BwdSteps steps_of_keys(const BackwardParams& p, const BwdWork& work) {
  const core::Fault fault = p.fwd.fault;
  KeyRange queries = core::queries_that_see(
      work.seq.mask, {work.first_a, work.first_a + work.rows_a}, work.seq.q_len);
  if (fault.is(InjectedFault::last_query_tile_dropped)) {
    queries.end = min(queries.end, work.seq.q_len - C::kStep);
  }
  const std::int32_t skipped = fault.is(InjectedFault::group_last_head_only) ? p.group - 1 : 0;
  return {core::tile_begin(queries.begin, C::kStep), queries.end, work.kv_head * p.group + skipped,
          queries.empty() ? 0 : p.group - skipped};
}

/// Keys that the tile's queries see.
template <typename C>
__device__ __forceinline__ BwdSteps steps_of_queries(const BwdWork& work) {
  const KeyRange keys = work.rows_a <= 0 ? KeyRange{0, 0}
                                         : core::keys_seen_by_any(work.seq.mask, work.first_a,
                                                                  work.first_a + work.rows_a - 1);
  return {core::tile_begin(keys.begin, C::kStep), keys.end, work.h, keys.empty() ? 0 : 1};
}

/// Selects the sequence, the rows of A and the steps for (b, h). All threads call it.
template <typename C>
__device__ __forceinline__ void select_work(BwdTiles<C>& s, const BackwardParams& p,
                                            const core::BackwardTile& tile, std::int32_t b,
                                            std::int32_t h, std::int32_t kv_head) {
  __syncthreads();  // all threads have read the previous work
  if (threadIdx.x == 0) {
    BwdWork& work = s.work;
    work.seq = core::seq_info_of(p.fwd, b);
    report(p.fwd, work.seq.error);
    if (p.fwd.fault.is(InjectedFault::bwd_mask_ignored)) {
      work.seq.mask.left = work.seq.mask.right = -1;
    }
    work.b = b;
    work.h = h;
    work.kv_head = kv_head;
    work.first_a = tile.tile * C::kTile;
    const bool keys = tile.output == BackwardOutput::dkdv;
    work.rows_a = min(C::kTile, (keys ? work.seq.kv_len : work.seq.q_len) - work.first_a);
    work.steps = keys ? steps_of_keys<C>(p, work) : steps_of_queries<C>(work);
    const KeyRange a{work.first_a, work.first_a + C::kTile};
    if (keys) {
      work.plain = core::queries_that_see_all(work.seq.mask, a, work.seq.q_len);
    } else if (a.end <= work.seq.q_len) {
      work.plain = core::keys_seen_by_all(work.seq.mask, a.begin, a.end - 1);
    } else {
      work.plain = {0, 0};
    }
    work.unit = tile.output == BackwardOutput::dbias ? 1.f : core::ds_unit(p, b, kv_head);
  }
  __syncthreads();
}

}  // namespace flashcore::cuda::sm80
