// Loads Q, K and V into swizzled shared memory tiles by cp.async. Rows past the sequence and
// columns past head_dim become zero bytes, so padding never matters. In 8-bit formats a zero byte
// may stand for another finite value; it only meets zeros of Q or P.
#pragma once

#include "cuda/primitives/compiler.cuh"
#include "cuda/primitives/cp_async.cuh"
#include "cuda/primitives/memory.cuh"
#include "cuda/primitives/pdl.cuh"
#include "cuda/sm80/config.cuh"

namespace flashcore::cuda::sm80 {

/// The part of a tile that one of kThreads threads copies: chunk `chunk` of every panel, of rows
/// `row`, row + kRowStep, …
template <typename Tile, int kThreads>
struct ThreadCopies {
  static constexpr int kRowStep = kThreads / Tile::kPanelChunks;
  static_assert(kRowStep % 8 == 0 || (kRowStep == 4 && Tile::kPanelColumns == 64));
  int row, chunk;
  __device__ __forceinline__ explicit ThreadCopies(int index)
      : row(index / Tile::kPanelChunks), chunk(index % Tile::kPanelChunks) {}
  /// Address of the thread's n-th row, from the address of its first.
  __device__ static __forceinline__ std::uint32_t nth_row(std::uint32_t s_first, int n) {
    if constexpr (kRowStep % 8 == 0) {
      return Tile::advance_rows8(s_first, n * (kRowStep / 8));
    } else {
      return Tile::advance_rows4(s_first, n);
    }
  }
};

__device__ __forceinline__ std::uint32_t bits_of(std::uint8_t x) { return x; }
template <typename T>
__device__ __forceinline__ std::uint32_t bits_of(T x) {
  return reinterpret_cast<const std::uint16_t&>(x);
}

/// Packs `count` elements, `stride` apart, into a word; the rest of it comes from `filling`.
template <typename T>
__device__ __forceinline__ std::uint32_t gather_word(const T* g_from, int count,
                                                     std::int64_t stride,
                                                     std::uint32_t filling = 0) {
  constexpr int kBits = 8 * sizeof(T);
  std::uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 32 / kBits; ++i) {
    const std::uint32_t mask = ((1u << kBits) - 1) << (kBits * i);
    word |= i < count ? bits_of(g_from[i * stride]) << (kBits * i) : filling & mask;
  }
  return word;
}

/// Copies one chunk of a row that cp.async cannot read, truncated at `columns`.
template <typename T>
__device__ __forceinline__ void gather_chunk(std::uint32_t s_to, const T* g_row, int chunk,
                                             int columns, std::int64_t column_stride) {
  constexpr int kSize = sizeof(T), kElements = 16 / kSize;
  const int left = columns - kElements * chunk;  // may be <= 0
  g_row += kElements * chunk * column_stride;
#pragma unroll 1  // unrolled it takes many registers
  for (int i = 0; i < kElements; i += kElements / 4) {
    store_shared_4(s_to + i * kSize,
                   gather_word(g_row + i * column_stride, left - i, column_stride));
  }
}

/// Copies one chunk of any row, truncated at `columns`.
template <typename T>
__device__ __forceinline__ void copy_chunk(std::uint32_t s_to, const T* g_row, int chunk,
                                           int columns, std::int64_t column_stride, bool async) {
  constexpr int kSize = sizeof(T), kElements = 16 / kSize;
  if (async) {
    cp_async_16(s_to, g_row + kElements * chunk,
                max(min(kSize * (columns - kElements * chunk), 16), 0));
  } else {
    gather_chunk(s_to, g_row, chunk, columns, column_stride);
  }
}

/// q [tile_q, head_dim].
template <typename C, bool kFastPath>
__device__ __forceinline__ void load_q(SharedStorage<C>& s, const AttentionParams& p,
                                       const WorkTile& work) {
  using T = typename C::Element;
  using Tile = typename C::QueryTile;
  using Mine = ThreadCopies<Tile, C::kThreads>;
  const Mine mine(threadIdx.x);
  const T* g_q =
      static_cast<const T*>(p.q) + work.b * p.q_strides.batch + work.seq.q_row * p.q_strides.row;
  const int columns = C::template kAnyDim<kFastPath> ? p.head_dim : C::kHeadDim;
  constexpr int kMyRows = (C::kTileQ + Mine::kRowStep - 1) / Mine::kRowStep;
  if (C::kTileQ < Mine::kRowStep && mine.row >= C::kTileQ) return;
#pragma unroll(kFastPath ? kMyRows : 1)
  for (int n = 0; n < kMyRows; ++n) {
    const int r = mine.row + n * Mine::kRowStep;
    const Row row = row_of(p, work, r);
    const T* g_row = g_q + row.head * p.q_strides.head + row.query * p.q_strides.row;
    const std::uint32_t s_row = shared_address(s.q) + Tile::offset(r, mine.chunk);
#pragma unroll(kFastPath ? Tile::kPanels : 1)
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      copy_chunk(s_row + panel * Tile::kPanelBytes, g_row, panel * Tile::kPanelChunks + mine.chunk,
                 r < work.rows ? columns : 0, p.q_strides.column, kFastPath || p.async_rows);
    }
  }
}

// The wait that load_kv_tile() runs between address computation and copies.
struct NoWait {
  static constexpr bool kWaits = false;
  __device__ __forceinline__ void operator()() const {}
};
struct PdlWait {
  static constexpr bool kWaits = true;
  __device__ __forceinline__ void operator()() const { pdl_wait(); }
};

/// Loads the K or V tile [tile_k, head_dim] that begins at first_key: all of it, or with
/// warp-private K/V the warp's share. Keys past the visible ones become zero. `wait` runs after the
/// address computation and before the first read.
template <typename C, bool kFastPath, typename Wait = NoWait>
__device__ __forceinline__ void load_kv_tile(typename C::Stored* s_tile, const AttentionParams& p,
                                             const WorkTile& work, const void* g_data,
                                             const core::Strides& strides, int columns,
                                             std::int32_t first_key, Wait wait = {}) {
  using T = typename C::Stored;
  using Tile = typename C::KeyTile;
  using Mine = ThreadCopies<Tile, C::kWarpPrivateKv ? 32 : C::kThreads>;
  constexpr int kRows = C::kWarpPrivateKv ? C::kWarpKeys : C::kTileK;
  constexpr int kMyRows = (kRows + Mine::kRowStep - 1) / Mine::kRowStep;
  static_assert(kRows % Mine::kRowStep == 0 || kRows < Mine::kRowStep);
  const int index = opaque(threadIdx.x);
  const Mine mine(C::kWarpPrivateKv ? index % 32 : index);
  const int row = mine.row + (C::kWarpPrivateKv ? index / 32 * C::kWarpKeys : 0);
  std::uint32_t s_row = shared_address(s_tile) + Tile::offset(row, mine.chunk);
  const std::int32_t key = first_key + row, end = work.visible.end;
  const bool paged = work.g_table != nullptr;
  const T* g_rows = static_cast<const T*>(g_data) + (paged ? 0 : key * strides.row);
  if constexpr (Wait::kWaits) {
    // Always true. The condition makes the wait depend on the addresses; otherwise ptxas would
    // hoist it above their computation.
    asm volatile("" : "+l"(g_rows), "+r"(s_row));
    if ((reinterpret_cast<std::uintptr_t>(g_rows) | s_row) != 0) wait();
  }
  if (kRows < Mine::kRowStep && mine.row >= kRows) return;
  const auto copy_row = [&](int n, const T* g_row) {
    const bool in_range = key + n * Mine::kRowStep < end;
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      constexpr int kElements = 16 / sizeof(T);
      const int chunk = panel * Tile::kPanelChunks + mine.chunk;
      int bytes = 16;
      if constexpr (C::template kAnyDim<kFastPath>) {
        bytes = max(min(static_cast<int>(sizeof(T)) * (columns - kElements * chunk), 16), 0);
      }
      cp_async_16(Mine::nth_row(s_row, n) + panel * Tile::kPanelBytes, g_row + kElements * chunk,
                  in_range ? bytes : 0);
    }
  };
  const core::KvRowMap rows{p.pages, work.g_table, 0, 0};
  const auto paged_row = [&](int n) {
    const core::KvLocation at = rows.at(min(key + n * Mine::kRowStep, end - 1));
    return g_rows + at.block * strides.batch + at.row * strides.row;
  };
  if (!kFastPath && !p.async_rows) {
#pragma unroll 1
    for (int n = 0; n < kMyRows; ++n) {
      const T* g_row = paged ? paged_row(n) : g_rows + n * Mine::kRowStep * strides.row;
      const int left = key + n * Mine::kRowStep < end ? columns : 0;
#pragma unroll 1
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        gather_chunk(Mine::nth_row(s_row, n) + panel * Tile::kPanelBytes, g_row,
                     panel * Tile::kPanelChunks + mine.chunk, left, strides.column);
      }
    }
  } else if (!kFastPath) {  // one loop for rows with and without pages: there are four copies of it
#pragma unroll(C::kWarpRows == 32 ? 1 : 2)
    for (int n = 0; n < kMyRows; ++n) {
      copy_row(n, paged ? paged_row(n) : g_rows + n * Mine::kRowStep * strides.row);
    }
  } else if (paged) {
#pragma unroll(C::kWarpRows == 32 ? 2 : kMyRows)  // more take more registers
    for (int n = 0; n < kMyRows; ++n) copy_row(n, paged_row(n));
  } else {
#pragma unroll
    for (int n = 0; n < kMyRows; ++n) {
      copy_row(n, g_rows);
      g_rows += Mine::kRowStep * strides.row;
    }
  }
}

/// Loads the scales of a tile's keys, if K or V have scales per block.
template <typename C>
__device__ __forceinline__ void load_kv_scales(float* s_scales, const AttentionParams& p,
                                               const WorkTile& work, const core::Scales& scales,
                                               std::int32_t first_key) {
  if (!scales.is_per_block()) return;
  constexpr int kRows = C::kWarpPrivateKv ? C::kWarpKeys : C::kTileK;
  constexpr int kThreads = C::kWarpPrivateKv ? 32 : C::kThreads;
  const int index = opaque(threadIdx.x);
  const int first = C::kWarpPrivateKv ? index / 32 * C::kWarpKeys : 0;
#pragma unroll 1
  for (int row = first + index % kThreads; row < first + kRows; row += kThreads) {
    const std::int32_t key = first_key + row;
    const bool in_range = key < work.visible.end;
    cp_async_4(shared_address(s_scales + row),
               scales.address(work.b, work.kv_head, in_range ? core::scaled_as(p, key) : 0),
               in_range ? 4 : 0);
  }
}

template <typename C, bool kFastPath, typename Wait = NoWait>
__device__ __forceinline__ void copy_k(SharedStorage<C>& s, const AttentionParams& p,
                                       const WorkTile& work, int stage, std::int32_t first_key,
                                       Wait wait = {}) {
  if (first_key >= work.visible.end) {
    wait();
    return;
  }
  const bool truncated = p.fault.is(InjectedFault::head_dim_truncated);
  load_kv_tile<C, kFastPath>(s.k[stage], p, work, work.g_k, p.k_strides,
                             truncated ? p.head_dim - 1 : p.head_dim, first_key, wait);
  if constexpr (C::kKv8) load_kv_scales<C>(s.k_scale[stage], p, work, p.k_scale, first_key);
}

// Every step commits one cp.async group for K and one for V, even if empty, so that
// cp_async_wait<n>() can count groups.

template <typename C, bool kFastPath>
__device__ __forceinline__ void load_k(SharedStorage<C>& s, const AttentionParams& p,
                                       const WorkTile& work, int stage, std::int32_t first_key) {
  copy_k<C, kFastPath>(s, p, work, stage, first_key);
  cp_async_commit();
}

template <typename C, bool kFastPath>
__device__ __forceinline__ void load_v(SharedStorage<C>& s, const AttentionParams& p,
                                       const WorkTile& work, int stage, std::int32_t first_key) {
  if (first_key < work.visible.end) {
    load_kv_tile<C, kFastPath>(s.v[stage], p, work, work.g_v, p.v_strides, p.v_dim, first_key);
    if constexpr (C::kKv8) load_kv_scales<C>(s.v_scale[stage], p, work, p.v_scale, first_key);
  }
  cp_async_commit();
}

}  // namespace flashcore::cuda::sm80
