// Copies of Q, K and V into swizzled tiles, in the background. Past the end of a sequence and past
// head_dim a tile becomes zero, so that padding never matters.
#pragma once

#include "cuda/primitives/ptx.cuh"
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
      return Tile::below(s_first, n * (kRowStep / 8));
    } else {
      return Tile::fours_below(s_first, n);
    }
  }
};

/// One chunk that may be cut off at `columns`, or whose row cannot be reached by copies (then it is
/// gathered at once).
template <typename T>
__device__ __forceinline__ void copy_chunk(std::uint32_t s_to, const T* g_row, int chunk,
                                           int columns, std::int64_t column_stride, bool async) {
  const int left = columns - 8 * chunk;  // may be <= 0
  if (async) {
    copy_async_16(s_to, g_row + 8 * chunk, max(min(2 * left, 16), 0));
    return;
  }
  std::uint32_t x[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < left) {
      const T one = g_row[(8 * chunk + i) * column_stride];
      x[i / 2] |= static_cast<std::uint32_t>(reinterpret_cast<const std::uint16_t&>(one))
                  << (16 * (i % 2));
    }
  }
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(s_to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

template <typename C, bool kPlain>
__device__ __forceinline__ void load_queries(SharedStorage<C>& s, const AttentionParams& p,
                                             const Item& item) {
  using T = typename C::Element;
  using Tile = typename C::QueryTile;
  using Mine = Copies<Tile, C::kThreads>;
  const Mine mine(threadIdx.x);
  const T* g_q = static_cast<const T*>(p.q) + item.b * p.q_strides.batch +
                 item.sequence.q_row * p.q_strides.row;
  const int columns = kPlain ? C::kHeadDim : p.head_dim;
  constexpr int kMyRows = (C::kTileQ + Mine::kRowStep - 1) / Mine::kRowStep;
  if (C::kTileQ < Mine::kRowStep && mine.row >= C::kTileQ) return;
#pragma unroll(kPlain ? kMyRows : 1)
  for (int n = 0; n < kMyRows; ++n) {
    const int r = mine.row + n * Mine::kRowStep;
    const Row row = row_of(p, item, r);
    const T* g_row = g_q + row.head * p.q_strides.head + row.query * p.q_strides.row;
    const std::uint32_t s_row = shared_address(s.q) + Tile::offset(r, mine.chunk);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      copy_chunk(s_row + panel * Tile::kPanelBytes, g_row, panel * Tile::kPanelChunks + mine.chunk,
                 r < item.rows ? columns : 0, p.q_strides.column, kPlain || p.async_rows);
    }
  }
}

/// Copies K or V of the step that begins at first_key: all of it or, where keys belong to warps,
/// the warp's share. Keys past those seen become zero.
template <typename C, bool kPlain>
__device__ __forceinline__ void load_tile(typename C::Element* s_tile, const AttentionParams& p,
                                          const Item& item, const void* g_data,
                                          const core::Strides& strides, int columns,
                                          std::int32_t first_key) {
  using T = typename C::Element;
  using Tile = typename C::KeyTile;
  using Mine = Copies<Tile, C::kOwnKeys ? 32 : C::kThreads>;
  constexpr int kRows = C::kOwnKeys ? C::kWarpKeys : C::kTileK;
  constexpr int kMyRows = (kRows + Mine::kRowStep - 1) / Mine::kRowStep;
  static_assert(kRows % Mine::kRowStep == 0 || kRows < Mine::kRowStep);
  const int index = not_hoisted(threadIdx.x);
  const Mine mine(C::kOwnKeys ? index % 32 : index);
  if (kRows < Mine::kRowStep && mine.row >= kRows) return;
  const int row = mine.row + (C::kOwnKeys ? index / 32 * C::kWarpKeys : 0);
  const std::uint32_t s_row = shared_address(s_tile) + Tile::offset(row, mine.chunk);
  const std::int32_t key = first_key + row, end = item.seen.end;
  const T* g_rows = static_cast<const T*>(g_data);
  const auto copy_row = [&](int n, const T* g_row) {
    const bool given = key + n * Mine::kRowStep < end;
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const std::uint32_t s_to = Mine::nth_row(s_row, n) + panel * Tile::kPanelBytes;
      const int chunk = panel * Tile::kPanelChunks + mine.chunk;
      if constexpr (kPlain) {
        copy_async_16(s_to, g_row + 8 * chunk, given ? 16 : 0);
      } else {
        copy_chunk(s_to, g_row, chunk, given ? columns : 0, strides.column, p.async_rows);
      }
    }
  };
  constexpr int kUnroll = kPlain ? kMyRows : 1;
  // Tiles of many rows have no registers for pages: they go the long way (AttentionParams::plain).
  if ((!kPlain || C::kOwnKeys) && item.g_table != nullptr) {
    const core::KeyRows pages{p.pages, item.g_table, 0, 0};
#pragma unroll(kUnroll)
    for (int n = 0; n < kMyRows; ++n) {
      const core::KeyPlace at = pages.at(min(key + n * Mine::kRowStep, end - 1));
      copy_row(n, g_rows + at.block * strides.batch + at.row * strides.row);
    }
    return;
  }
  g_rows += key * strides.row;
#pragma unroll(kUnroll)
  for (int n = 0; n < kMyRows; ++n) {
    copy_row(n, g_rows);
    g_rows += Mine::kRowStep * strides.row;
  }
}

// Every step has its groups of copies, be they empty.

template <typename C, bool kPlain>
__device__ __forceinline__ void load_keys(SharedStorage<C>& s, const AttentionParams& p,
                                          const Item& item, int stage, std::int32_t first_key) {
  const bool truncated = p.plant.is(PlantedBug::head_dim_truncated);
  if (first_key < item.seen.end) {
    load_tile<C, kPlain>(s.k[stage], p, item, item.g_k, p.k_strides,
                         truncated ? p.head_dim - 1 : p.head_dim, first_key);
  }
  commit_copies();
}

template <typename C, bool kPlain>
__device__ __forceinline__ void load_values(SharedStorage<C>& s, const AttentionParams& p,
                                            const Item& item, int stage, std::int32_t first_key) {
  if (first_key < item.seen.end) {
    load_tile<C, kPlain>(s.v[stage], p, item, item.g_v, p.v_strides, p.v_dim, first_key);
  }
  commit_copies();
}

}  // namespace flashcore::cuda::sm80
