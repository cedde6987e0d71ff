// Copies of Q, K and V into swizzled tiles, in the background. Past the end of a sequence and past
// head_dim a tile becomes zero, so that padding never matters. (8-bit zeros may mean something
// else, but a finite value: it meets zeros in Q or a probability of 0.)
#pragma once

#include "cuda/primitives/compiler.cuh"
#include "cuda/primitives/cp_async.cuh"
#include "cuda/primitives/memory.cuh"
#include "cuda/primitives/pdl.cuh"
#include "cuda/sm80/config.cuh"

namespace flashcore::cuda::sm80 {

/// Which chunks of a tile a thread of kThreads copies: chunk `chunk` of every panel, of the rows
/// `row`, row + kRowStep, …
template <typename Tile, int kThreads>
struct Copies {
  static constexpr int kRowStep = kThreads / Tile::kPanelChunks;
  static_assert(kRowStep % 8 == 0 || (kRowStep == 4 && Tile::kPanelColumns == 64));
  int row, chunk;
  __device__ __forceinline__ explicit Copies(int index)
      : row(index / Tile::kPanelChunks), chunk(index % Tile::kPanelChunks) {}
  /// The address of the thread's n-th row, from that of its first.
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

/// A word of `count` elements (at most as many as it holds) that lie `stride` apart; the rest of it
/// comes from `filling`.
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

/// One chunk that may be cut off at `columns`, or whose row cannot be reached by copies (then it is
/// gathered at once).
template <typename T>
__device__ __forceinline__ void copy_chunk(std::uint32_t s_to, const T* g_row, int chunk,
                                           int columns, std::int64_t column_stride, bool async) {
  constexpr int kSize = sizeof(T), kPiece = 16 / kSize;
  const int left = columns - kPiece * chunk;  // may be <= 0
  if (async) {
    cp_async_16(s_to, g_row + kPiece * chunk, max(min(kSize * left, 16), 0));
    return;
  }
  g_row += kPiece * chunk * column_stride;
#pragma unroll(kSize == 1 ? 1 : 4)  // a loop of bytes would take many registers
  for (int i = 0; i < kPiece; i += kPiece / 4) {
    store_shared_4(s_to + i * kSize,
                   gather_word(g_row + i * column_stride, left - i, column_stride));
  }
}

template <typename C, bool kFastPath>
__device__ __forceinline__ void load_queries(SharedStorage<C>& s, const AttentionParams& p,
                                             const WorkTile& item) {
  using T = typename C::Element;
  using Tile = typename C::QueryTile;
  using Mine = Copies<Tile, C::kThreads>;
  const Mine mine(threadIdx.x);
  const T* g_q =
      static_cast<const T*>(p.q) + item.b * p.q_strides.batch + item.seq.q_row * p.q_strides.row;
  const int columns = kFastPath ? C::kHeadDim : p.head_dim;
  constexpr int kMyRows = (C::kTileQ + Mine::kRowStep - 1) / Mine::kRowStep;
  if (C::kTileQ < Mine::kRowStep && mine.row >= C::kTileQ) return;
#pragma unroll(kFastPath ? kMyRows : 1)
  for (int n = 0; n < kMyRows; ++n) {
    const int r = mine.row + n * Mine::kRowStep;
    const Row row = row_of(p, item, r);
    const T* g_row = g_q + row.head * p.q_strides.head + row.query * p.q_strides.row;
    const std::uint32_t s_row = shared_address(s.q) + Tile::offset(r, mine.chunk);
#pragma unroll(kFastPath ? Tile::kPanels : 1)
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      copy_chunk(s_row + panel * Tile::kPanelBytes, g_row, panel * Tile::kPanelChunks + mine.chunk,
                 r < item.rows ? columns : 0, p.q_strides.column, kFastPath || p.async_rows);
    }
  }
}

// What copies of K or V may wait for, once it is known what goes where.
struct ForNothing {
  static constexpr bool kWaits = false;
  __device__ __forceinline__ void operator()() const {}
};
struct ForPreviousKernel {
  static constexpr bool kWaits = true;
  __device__ __forceinline__ void operator()() const { pdl_wait(); }
};

/// Copies K or V of the step that begins at first_key: all of it or, where keys belong to warps,
/// the warp's share. Keys past those seen become zero. `wait` is called when it is known what goes
/// where, before anything is read.
template <typename C, bool kFastPath, typename Wait = ForNothing>
__device__ __forceinline__ void load_tile(typename C::Stored* s_tile, const AttentionParams& p,
                                          const WorkTile& item, const void* g_data,
                                          const core::Strides& strides, int columns,
                                          std::int32_t first_key, Wait wait = {}) {
  using T = typename C::Stored;
  using Tile = typename C::KeyTile;
  using Mine = Copies<Tile, C::kWarpPrivateKv ? 32 : C::kThreads>;
  constexpr int kRows = C::kWarpPrivateKv ? C::kWarpKeys : C::kTileK;
  constexpr int kMyRows = (kRows + Mine::kRowStep - 1) / Mine::kRowStep;
  static_assert(kRows % Mine::kRowStep == 0 || kRows < Mine::kRowStep);
  const int index = opaque(threadIdx.x);
  const Mine mine(C::kWarpPrivateKv ? index % 32 : index);
  const int row = mine.row + (C::kWarpPrivateKv ? index / 32 * C::kWarpKeys : 0);
  std::uint32_t s_row = shared_address(s_tile) + Tile::offset(row, mine.chunk);
  const std::int32_t key = first_key + row, end = item.visible.end;
  // Tiles of many rows have no registers for pages: they go the long way (AttentionParams::plain),
  // which finds the rows of other keys like that too.
  const bool finds_rows = !kFastPath || (C::kWarpPrivateKv && item.g_table != nullptr);
  const T* g_rows = static_cast<const T*>(g_data) + (finds_rows ? 0 : key * strides.row);
  if constexpr (Wait::kWaits) {
    // Never null. Asked so that all of it is found out by now: ptxas would move the wait up.
    asm volatile("" : "+l"(g_rows), "+r"(s_row));
    if ((reinterpret_cast<std::uintptr_t>(g_rows) | s_row) != 0) wait();
  }
  if (kRows < Mine::kRowStep && mine.row >= kRows) return;
  const auto copy_row = [&](int n, const T* g_row) {
    const bool given = key + n * Mine::kRowStep < end;
#pragma unroll(kFastPath ? Tile::kPanels : 1)  // the long way is long: once is enough to compile it
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const std::uint32_t s_to = Mine::nth_row(s_row, n) + panel * Tile::kPanelBytes;
      const int chunk = panel * Tile::kPanelChunks + mine.chunk;
      if constexpr (kFastPath) {
        cp_async_16(s_to, g_row + 16 / sizeof(T) * chunk, given ? 16 : 0);
      } else {
        copy_chunk(s_to, g_row, chunk, given ? columns : 0, strides.column, p.async_rows);
      }
    }
  };
  constexpr int kUnroll = kFastPath ? kMyRows : 1;
  if (!finds_rows) {
#pragma unroll(kUnroll)
    for (int n = 0; n < kMyRows; ++n) {
      copy_row(n, g_rows);
      g_rows += Mine::kRowStep * strides.row;
    }
    return;
  }
  const core::KvRowMap rows{p.pages, item.g_table, 0, 0};
#pragma unroll(kUnroll)
  for (int n = 0; n < kMyRows; ++n) {
    const core::KvLocation at = rows.at(min(key + n * Mine::kRowStep, end - 1));
    copy_row(n, g_rows + at.block * strides.batch + at.row * strides.row);
  }
}

/// Scales of the keys of a step, where these have some.
template <typename C>
__device__ __forceinline__ void load_scales(float* s_scales, const AttentionParams& p,
                                            const WorkTile& item, const core::Scales& scales,
                                            std::int32_t first_key) {
  if (!scales.is_per_block()) return;
  constexpr int kRows = C::kWarpPrivateKv ? C::kWarpKeys : C::kTileK;
  constexpr int kThreads = C::kWarpPrivateKv ? 32 : C::kThreads;
  const int index = opaque(threadIdx.x);
  const int first = C::kWarpPrivateKv ? index / 32 * C::kWarpKeys : 0;
#pragma unroll 1
  for (int row = first + index % kThreads; row < first + kRows; row += kThreads) {
    const std::int32_t key = first_key + row;
    const bool given = key < item.visible.end;
    cp_async_4(shared_address(s_scales + row),
               scales.address(item.b, item.kv_head, given ? core::scaled_as(p, key) : 0),
               given ? 4 : 0);
  }
}

template <typename C, bool kFastPath, typename Wait = ForNothing>
__device__ __forceinline__ void copy_keys(SharedStorage<C>& s, const AttentionParams& p,
                                          const WorkTile& item, int stage, std::int32_t first_key,
                                          Wait wait = {}) {
  if (first_key >= item.visible.end) {
    wait();
    return;
  }
  const bool truncated = p.fault.is(InjectedFault::head_dim_truncated);
  load_tile<C, kFastPath>(s.k[stage], p, item, item.g_k, p.k_strides,
                          truncated ? p.head_dim - 1 : p.head_dim, first_key, wait);
  if constexpr (C::kKv8) load_scales<C>(s.k_of_key[stage], p, item, p.k_scale, first_key);
}

// Every step has its groups of copies, be they empty.

template <typename C, bool kFastPath>
__device__ __forceinline__ void load_keys(SharedStorage<C>& s, const AttentionParams& p,
                                          const WorkTile& item, int stage, std::int32_t first_key) {
  copy_keys<C, kFastPath>(s, p, item, stage, first_key);
  cp_async_commit();
}

template <typename C, bool kFastPath>
__device__ __forceinline__ void load_values(SharedStorage<C>& s, const AttentionParams& p,
                                            const WorkTile& item, int stage,
                                            std::int32_t first_key) {
  if (first_key < item.visible.end) {
    load_tile<C, kFastPath>(s.v[stage], p, item, item.g_v, p.v_strides, p.v_dim, first_key);
    if constexpr (C::kKv8) load_scales<C>(s.v_of_key[stage], p, item, p.v_scale, first_key);
  }
  cp_async_commit();
}

}  // namespace flashcore::cuda::sm80
