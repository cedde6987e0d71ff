// Attention forward on tensor cores (mma.sync, sm_80 and up): softmax(Q K^T) V in one kernel, for
// prefill and for decode, every option.
//
//   grid     one block per (batch, KV head, tile of query rows, key range). The query heads of a
//            GQA group share K and V, so they share a block: row r of a KV head is query r / group
//            of head r % group
//   block    kRowWarps × kKeyWarps warps. A warp owns 16 or 32 rows of the tile and, of each step's
//            tile_k keys, its own share; with kKeyWarps > 1 the shares are joined at the end
//   steps    tile_k keys at a time through a ring of kStages pairs of K and V tiles, filled by
//            cp.async. One barrier per step: after it the step's tiles are there and the pair used
//            one step ago is free for the next copies
//   scores   stay in registers: S is the accumulator of Q K^T and, packed to 16 bits, the A operand
//            of P V
//   smem     Q tile, ring of K and V tiles, all swizzled (core/mma_layout.h); when the loop is over,
//            the results in their place
#pragma once

#include <cuda_runtime.h>

#include "core/combine.h"
#include "core/element.h"
#include "core/mask.h"
#include "core/mma_layout.h"
#include "core/params.h"
#include "core/sequence.h"
#include "core/softmax_state.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/ptx.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/primitives/report.cuh"

namespace flashcore::cuda::sm80 {

using core::AttentionParams;
using core::KeyRange;
using core::PlantedBug;

template <typename Element_, int kHeadDim_, int kTileQ_, int kTileK_, int kStages_, int kThreads_>
struct Config {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // head_dim and v_dim at most
  static constexpr int kTileQ = kTileQ_;
  static constexpr int kTileK = kTileK_;
  static constexpr int kStages = kStages_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kWarpRows = kTileQ / kWarps >= 32 ? 32 : 16;
  static constexpr int kRowWarps = kTileQ / kWarpRows;
  static constexpr int kKeyWarps = kWarps / kRowWarps;
  static constexpr int kWarpKeys = kTileK / kKeyWarps;
  static constexpr int kOptionKeys = kWarpKeys % 32 == 0 ? 32 : 16;
  static constexpr int kRowTiles = kWarpRows / 16;    // m-tiles of a warp
  static constexpr int kColumnTiles = kHeadDim / 8;   // n-tiles of its output
  static constexpr int kSteps = kHeadDim / 16;        // k-steps of Q K^T
  using QueryTile = core::SwizzledTile<kTileQ, kHeadDim>;
  using KeyTile = core::SwizzledTile<kTileK, kHeadDim>;  // of K and of V
  // Where accumulators leave room for it, 128 registers a thread and twice the warps.
  static constexpr bool kFewRegisters = 4 * kRowTiles * (kWarpKeys / 8 + kColumnTiles) <= 64;
  static constexpr int kMinBlocks = kFewRegisters ? 512 / kThreads : 1;
  static_assert(kRowWarps * kKeyWarps == kWarps && kWarpKeys % 16 == 0 && kHeadDim % 32 == 0);
};

/// What one block works on, written by one thread and read by all.
struct alignas(16) Item {
  core::Sequence sequence;
  const void* g_k;  // [kv_len, head_dim] of this sequence and KV head
  const void* g_v;  // [kv_len, v_dim]
  std::int32_t b, kv_head, split;
  std::int32_t first_row, rows;  // of the KV head's q_len * group rows
  KeyRange seen;                 // keys some query of the tile sees, within the split
  KeyRange all;                  // keys every query of the tile sees
  bool options;                  // scores need more than a factor, see finish_scores()
  float factor;                  // of the scores in the softmax
};

/// A row of the tile: which query of which head it is, and the keys it sees within the split.
struct alignas(16) Row {
  std::int32_t query;
  std::int32_t head;
  KeyRange range;
};

__device__ __forceinline__ Row row_of(const AttentionParams& p, const Item& item, int r) {
  const std::int32_t index = item.first_row + r;
  const std::int32_t query = index / p.group;
  return {query, item.kv_head * p.group + (index - query * p.group),
          core::intersect(core::visible_keys(item.sequence.mask, query), item.seen)};
}

template <typename C>
struct KeyValueTiles {
  alignas(128) typename C::Element k[C::KeyTile::kElements];
  alignas(128) typename C::Element v[C::KeyTile::kElements];
};

/// What a block passes around when its loop is over. Rows of o are padded so that the lanes of a
/// warp write to different banks.
template <typename C>
struct Results {
  float o[C::kKeyWarps][C::kTileQ][C::kHeadDim + 8];
  core::SoftmaxState<float> state[C::kKeyWarps][C::kTileQ];
  float weight[C::kKeyWarps][C::kTileQ];  // of o in the output
};

/// A thread's softmax states, of the row of register pair `half` of m-tile m. A row's sum is spread
/// over the four lanes of its quad until the end. They are looked at once per step: in registers
/// they would displace scores.
template <typename C>
struct alignas(16) RowStates {
  core::SoftmaxState<float> of[C::kRowTiles][2];
};

template <typename C>
struct alignas(128) SharedStorage {
  union {
    struct {
      alignas(128) typename C::Element q[C::QueryTile::kElements];
      KeyValueTiles<C> ring[C::kStages];
    };
    Results<C> results;
  };
  RowStates<C> states[C::kThreads];
  Row rows[C::kTileQ];
  Item item;
  bool last;  // of the blocks of an item

  /// The pair of the ring for the step that begins at first_key.
  __device__ __forceinline__ KeyValueTiles<C>& place_of(std::int32_t first_key) {
    return ring[first_key / C::kTileK % C::kStages];
  }
};

// ---------------------------------------------------------------------------------------------
// Rows

template <typename C>
struct Thread {
  int lane, row_warp, key_warp;

  __device__ __forceinline__ explicit Thread(int index) {
    const int warp = index / 32;
    lane = index % 32;
    row_warp = warp % C::kRowWarps;
    key_warp = warp / C::kRowWarps;
  }
  /// Row of the tile that accumulator registers 2 half, 2 half + 1 of m-tile m belong to.
  __device__ __forceinline__ int row(int m, int half) const {
    return row_warp * C::kWarpRows + 16 * m + core::mma_c(lane, 2 * half).row;
  }
  /// Column of accumulator register reg of n-tile n.
  __device__ __forceinline__ int column(int n, int reg) const {
    return 8 * n + core::mma_c(lane, reg).column;
  }
};

// ---------------------------------------------------------------------------------------------
// Loading

/// Where a thread's copies of a tile go: it copies the 16-byte chunk `chunk` of every panel, of the
/// rows `row`, row + kRowStep, …
template <typename C, typename Tile>
struct Copies {
  static constexpr int kRowStep = C::kThreads / Tile::kPanelChunks;
  static_assert(kRowStep % 8 == 0);  // one swizzle for all its rows
  int row, chunk;
  __device__ __forceinline__ Copies() {
    const int index = not_hoisted(threadIdx.x);
    row = index / Tile::kPanelChunks;
    chunk = index % Tile::kPanelChunks;
  }
};

/// Fills a tile of kRows rows. next_row() gives the address of the thread's next row; past `rows`
/// and past `columns` the tile becomes zero, so that padding never matters.
template <typename C, typename Tile, int kRows, typename NextRow>
__device__ __forceinline__ void load_tile(typename C::Element* s_tile, int rows, int columns,
                                          std::int64_t column_stride, bool async_rows,
                                          NextRow next_row) {
  using T = typename C::Element;
  using Mine = Copies<C, Tile>;
  const Mine mine;
  if (kRows < Mine::kRowStep && mine.row >= kRows) return;
  static_assert(kRows % Mine::kRowStep == 0 || kRows < Mine::kRowStep);
  if (async_rows) {
    const std::uint32_t s_to = shared_address(s_tile) + Tile::offset(mine.row, mine.chunk);
#pragma unroll
    for (int r = 0; r < kRows; r += Mine::kRowStep) {
      const T* g_from = next_row() + 8 * mine.chunk;
      const bool row_given = mine.row + r < rows;
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        const int left = columns - panel * Tile::kPanelColumns - 8 * mine.chunk;
        copy_async_16(Tile::below(s_to, r / 8) + panel * Tile::kPanelBytes,
                      g_from + panel * Tile::kPanelColumns,
                      row_given ? max(min(2 * left, 16), 0) : 0);
      }
    }
    return;
  }
#pragma unroll 1
  for (int r = mine.row; r < kRows; r += Mine::kRowStep) {
    const T* g_from = next_row();
#pragma unroll 1
    for (int chunk = mine.chunk; chunk < C::kHeadDim / 8; chunk += Tile::kPanelChunks) {
      std::uint32_t x[4] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (r < rows && 8 * chunk + i < columns) {
          const T one = g_from[(8 * chunk + i) * column_stride];
          x[i / 2] |= static_cast<std::uint32_t>(reinterpret_cast<const std::uint16_t&>(one))
                      << (16 * (i % 2));
        }
      }
      *reinterpret_cast<uint4*>(reinterpret_cast<unsigned char*>(s_tile) + Tile::offset(r, chunk)) =
          make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}

template <typename C>
__device__ __forceinline__ void load_queries(SharedStorage<C>& s, const AttentionParams& p,
                                             const Item& item) {
  using T = typename C::Element;
  using Mine = Copies<C, typename C::QueryTile>;
  const T* g_q = static_cast<const T*>(p.q) + item.b * p.q_strides.batch +
                 item.sequence.q_row * p.q_strides.row;
  const int columns = p.plant.is(PlantedBug::head_dim_truncated) ? p.head_dim - 1 : p.head_dim;
  int r = Mine().row - Mine::kRowStep;
  load_tile<C, typename C::QueryTile, C::kTileQ>(
      s.q, item.rows, columns, p.q_strides.column, p.async_rows, [&] {
        r += Mine::kRowStep;
        const Row row = row_of(p, item, r);
        return g_q + row.head * p.q_strides.head + row.query * p.q_strides.row;
      });
}

/// Copies the keys and values of the step that begins at first_key.
template <typename C>
__device__ __forceinline__ void load_step(KeyValueTiles<C>& s_tiles, const AttentionParams& p,
                                          const Item& item, std::int32_t first_key) {
  using T = typename C::Element;
  using Mine = Copies<C, typename C::KeyTile>;
  const auto load = [&](T* s_tile, const void* g_rows, const core::Strides& strides, int columns) {
    const T* g_row = static_cast<const T*>(g_rows) + (first_key + Mine().row) * strides.row;
    load_tile<C, typename C::KeyTile, C::kTileK>(
        s_tile, item.seen.end - first_key, columns, strides.column, p.async_rows, [&] {
          const T* g_this = g_row;
          g_row += Mine::kRowStep * strides.row;
          return g_this;
        });
  };
  load(s_tiles.k, item.g_k, p.k_strides, p.head_dim);
  load(s_tiles.v, item.g_v, p.v_strides, p.v_dim);
}

// ---------------------------------------------------------------------------------------------
// Scores

// A warp computes the scores of all its keys of a step at once or, where options need registers too,
// of kKeys at a time.
template <typename C, int kKeys>
using Scores = float[C::kRowTiles][kKeys / 8][4];
template <typename C>
using Outputs = float[C::kRowTiles][C::kColumnTiles][4];

/// score = Q K^T of the warp's rows and the keys from row s_key of the tile on.
template <typename C, int kKeys>
__device__ __forceinline__ void multiply_queries(Scores<C, kKeys>& score, const SharedStorage<C>& s,
                                                 const KeyValueTiles<C>& s_tiles, int s_key,
                                                 const Thread<C>& t) {
  using QueryTile = typename C::QueryTile;
  using KeyTile = typename C::KeyTile;
  const core::Coordinate a = core::ldmatrix_a(t.lane), b = core::ldmatrix_b(t.lane);
  const std::uint32_t s_q =
      shared_address(s.q) + QueryTile::offset(t.row_warp * C::kWarpRows + a.row, a.column);
  const std::uint32_t s_k =
      shared_address(s_tiles.k) + KeyTile::offset(s_key + b.row, b.column);
#pragma unroll 4  // a panel: unrolling more would need more registers for addresses
  for (int step = 0; step < C::kSteps; ++step) {
    std::uint32_t q[C::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      load_matrices(q[m], QueryTile::below(QueryTile::right(s_q, step), 2 * m));
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      std::uint32_t k[4];
      load_matrices(k, KeyTile::below(KeyTile::right(s_k, step), n));
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        multiply_add<typename C::Element>(score[m][n], q[m], k[0], k[1]);
        multiply_add<typename C::Element>(score[m][n + 1], q[m], k[2], k[3]);
      }
    }
  }
}

/// Whether scores need more than a factor: then they are finished in place, in base-2 logarithms,
/// and the softmax's factor is 1. (Nor can a factor <= 0 wait until after the maximum.)
__device__ __forceinline__ bool has_score_options(const AttentionParams& p) {
  return p.softcap_log2 > 0 || p.alibi_slopes != nullptr || p.bias != nullptr ||
         p.mask != nullptr || !(p.q_factor > 0);
}

__device__ __forceinline__ float score_factor(const AttentionParams& p) {
  return p.plant.is(PlantedBug::scale_ignored) ? static_cast<float>(core::kLog2E)
                                               : static_cast<float>(p.q_factor);
}

/// score[key] += log2(e) · bias for one row's scores; g_bias is the row, [kv_len].
template <typename C, int kKeys, typename Bias>
__device__ __forceinline__ void add_bias(float (&score)[kKeys / 8][4], int half,
                                         const Thread<C>& t, const Bias* g_bias,
                                         std::int64_t stride, std::int32_t first_key,
                                         KeyRange range) {
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int reg = 2 * half; reg < 2 * half + 2; ++reg) {
      const std::int32_t key = first_key + t.column(n, reg);
      if (range.contains(key)) {
        score[n][reg] = fmaf(to_float(g_bias[key * stride]), static_cast<float>(core::kLog2E),
                             score[n][reg]);
      }
    }
  }
}

template <typename C, int kKeys>
__device__ __forceinline__ void add_bias_row(float (&score)[kKeys / 8][4], int half,
                                             const Thread<C>& t, const AttentionParams& p,
                                             std::int64_t offset, std::int32_t first_key,
                                             KeyRange range) {
  using T = typename C::Element;
  if (p.bias_element == core::Element::f32) {
    add_bias<C, kKeys>(score, half, t, static_cast<const float*>(p.bias) + offset, p.bias_strides.column,
                first_key, range);
  } else {
    add_bias<C, kKeys>(score, half, t, static_cast<const T*>(p.bias) + offset, p.bias_strides.column,
                first_key, range);
  }
}

/// Softcap, ALiBi, bias and boolean mask of one row's scores (registers 2 half, 2 half + 1 of every
/// n-tile). first_key is the warp's.
template <typename C, int kKeys>
__device__ __forceinline__ void finish_row(float (&score)[kKeys / 8][4], int half,
                                           const Thread<C>& t, const AttentionParams& p,
                                           const Item& item, const Row& row,
                                           std::int32_t first_key) {
  const KeyRange range = row.range;
  const auto each = [&](auto change) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int reg = 2 * half; reg < 2 * half + 2; ++reg) {
        change(score[n][reg], first_key + t.column(n, reg));
      }
    }
  };
  const float factor = score_factor(p);
  each([&](float& x, std::int32_t) { x *= factor; });
  const std::int64_t bias_row = item.b * p.bias_strides.batch + row.head * p.bias_strides.head +
                                row.query * p.bias_strides.row;
  const bool bias_first = p.plant.is(PlantedBug::softcap_after_bias);
  if (p.bias != nullptr && bias_first) {
    add_bias_row<C, kKeys>(score, half, t, p, bias_row, first_key, range);
  }
  if (p.softcap_log2 > 0) {
    const float cap_log2 = static_cast<float>(p.softcap_log2);
    each([&](float& x, std::int32_t) { x = capped(x, cap_log2); });
  }
  if (p.alibi_slopes != nullptr) {
    const float slope =
        p.alibi_slopes[item.b * p.alibi_batch_stride + row.head * p.alibi_head_stride] *
        static_cast<float>(core::kLog2E);
    const std::int64_t position = row.query + item.sequence.mask.diagonal;
    each([&](float& x, std::int32_t key) {
      const float distance = static_cast<float>(position - key);
      x -= slope * (p.plant.is(PlantedBug::alibi_signed) ? distance : fabsf(distance));
    });
  }
  if (p.bias != nullptr && !bias_first) {
    add_bias_row<C, kKeys>(score, half, t, p, bias_row, first_key, range);
  }
  if (p.mask != nullptr) {
    const std::int64_t b = p.plant.is(PlantedBug::mask_batch_ignored) ? 0 : item.b;
    const std::uint8_t* g_mask = p.mask + b * p.mask_strides.batch +
                                 row.head * p.mask_strides.head + row.query * p.mask_strides.row;
    each([&](float& x, std::int32_t key) {
      if (range.contains(key) && g_mask[key * p.mask_strides.column] == 0) {
        x = core::negative_infinity<float>();
      }
    });
  }
}

/// Options and masks, where a step needs them.
template <typename C, int kKeys, bool kOptions>
__device__ __forceinline__ void finish_scores(Scores<C, kKeys>& score, const Row* s_rows,
                                              const Thread<C>& t, const AttentionParams& p,
                                              const Item& item, std::int32_t first_key) {
  const bool all_visible =
      first_key >= item.all.begin && first_key + kKeys <= item.all.end;
  if (!kOptions && all_visible) return;  // the same in every lane
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row = s_rows[t.row(m, half)];
      if constexpr (kOptions) finish_row<C, kKeys>(score[m], half, t, p, item, row, first_key);
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int reg = 2 * half; reg < 2 * half + 2; ++reg) {
          if (!row.range.contains(first_key + t.column(n, reg))) {
            score[m][n][reg] = core::negative_infinity<float>();
          }
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Online softmax and output


inline constexpr float kLazyLog2 = 8.f;

/// Turns scores into probabilities, updates the states and rescales the output. Scores count
/// `factor` times; a state's maximum is kept without the factor.
template <typename C, int kKeys>
__device__ __forceinline__ void softmax(Scores<C, kKeys>& score, Outputs<C>& o, RowStates<C>& s_states,
                                        float factor, core::Plant plant) {
  RowStates<C> states = s_states;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      core::SoftmaxState<float>& state = states.of[m][half];
      float max = state.max;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        max = max_passing_nan(max, score[m][n][2 * half]);
        max = max_passing_nan(max, score[m][n][2 * half + 1]);
      }
      max = quad_max(max);
      // A maximum that grows by less than 2^8 may wait: P then exceeds 1, which no format minds, and
      // the output need not be rescaled. Decided for each row by itself.
      if ((max - state.max) * factor <= kLazyLog2) max = state.max;
      // Products are rounded before they are subtracted, so that a maximum that stays gives exactly
      // 1: a fused one would leave the rounding error, step after step the same.
      const float base = __fmul_rn(core::softmax_base(max), factor);
      float rescale = fast_exp2(__fsub_rn(__fmul_rn(state.max, factor), base));
      if (plant.is(PlantedBug::rescale_forgotten)) rescale = 1.f;
      state.max = max;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int reg = 2 * half; reg < 2 * half + 2; ++reg) {
          score[m][n][reg] = fast_exp2(fmaf(score[m][n][reg], factor, -base));
          sum += score[m][n][reg];
        }
      }
      state.sum = core::add_tile_sum(state.sum, rescale, sum);
      if (__any_sync(0xffffffffu, rescale != 1.f)) {  // else all are multiplied by exactly 1
#pragma unroll
        for (int n = 0; n < C::kColumnTiles; ++n) {
          o[m][n][2 * half] *= rescale;
          o[m][n][2 * half + 1] *= rescale;
        }
      }
    }
  }
  s_states = states;
}

/// O += P V of the warp's rows and keys.
template <typename C, int kKeys>
__device__ __forceinline__ void multiply_values(Outputs<C>& o, const Scores<C, kKeys>& p,
                                                const KeyValueTiles<C>& s_tiles, int s_key,
                                                const Thread<C>& t) {
  using T = typename C::Element;
  using KeyTile = typename C::KeyTile;
  const core::Coordinate b = core::ldmatrix_b_trans(t.lane);
  const std::uint32_t s_v =
      shared_address(s_tiles.v) + KeyTile::offset(s_key + b.row, b.column);
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
    // Two n-tiles of scores are one A operand: the accumulator's columns are its k.
    std::uint32_t a[C::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) {
        const float(&x)[4] = p[m][2 * step + reg / 2];
        a[m][reg] = pack<T>(x[2 * (reg % 2)], x[2 * (reg % 2) + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < C::kColumnTiles; n += 2) {
      std::uint32_t v[4];
      load_matrices_transposed(v, KeyTile::below(KeyTile::right(s_v, n / 2), 2 * step));
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        multiply_add<T>(o[m][n], a[m], v[0], v[1]);
        multiply_add<T>(o[m][n + 1], a[m], v[2], v[3]);
      }
    }
  }
}

// Output: the warps leave their results in shared memory, one thread per row joins the states of
// the key warps, then all threads write rows of the output.

template <typename C>
__device__ __forceinline__ void leave_results(Results<C>& s, const Outputs<C>& o,
                                              const RowStates<C>& states, const Thread<C>& t,
                                              float factor) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = t.row(m, half);
      const float sum = quad_sum(states.of[m][half].sum);
      if (t.lane % 4 == 0) s.state[t.key_warp][r] = {states.of[m][half].max * factor, sum};
#pragma unroll
      for (int n = 0; n < C::kColumnTiles; ++n) {
        *reinterpret_cast<float2*>(&s.o[t.key_warp][r][t.column(n, 2 * half)]) =
            make_float2(o[m][n][2 * half], o[m][n][2 * half + 1]);
      }
    }
  }
}

/// Row r's weights and LSE.
template <typename C>
__device__ __forceinline__ void finish_row_state(Results<C>& s, const AttentionParams& p,
                                                 const Item& item, const Row& row, int r) {
  core::SoftmaxState<float> all{core::negative_infinity<float>(), 0.f};
#pragma unroll
  for (int w = 0; w < C::kKeyWarps; ++w) all.max = max_passing_nan(all.max, s.state[w][r].max);
  const float base = core::softmax_base(all.max);
  float weight[C::kKeyWarps];
#pragma unroll
  for (int w = 0; w < C::kKeyWarps; ++w) {
    weight[w] = C::kKeyWarps == 1 ? 1.f : fast_exp2(s.state[w][r].max - base);
    all.sum = fmaf(s.state[w][r].sum, weight[w], all.sum);
  }
  float factor = 1.f;
  if (p.sinks != nullptr && (p.splits == 1 || p.plant.is(PlantedBug::sink_in_every_split))) {
    factor = core::add_sink(all,
                            p.sinks[row.head * p.sinks_stride] * static_cast<float>(core::kLog2E));
  }
  factor *=
      p.plant.is(PlantedBug::empty_row_is_nan) ? 1.f / all.sum : core::output_factor(all.sum);
#pragma unroll
  for (int w = 0; w < C::kKeyWarps; ++w) s.weight[w][r] = weight[w] * factor;
  float lse = core::log_sum_exp(all);
  if (p.plant.is(PlantedBug::lse_in_base_2)) lse *= static_cast<float>(core::kLog2E);
  if (p.plant.is(PlantedBug::row_not_written) && row.query == item.sequence.q_len - 1) return;
  if (p.splits > 1) {
    static_cast<float*>(p.partial_lse)[item.split * core::partial_rows(p) +
                                       core::partial_row(p, item.b, row.head, item.sequence.q_row,
                                                         row.query)] = lse;
  } else if (p.lse != nullptr) {
    const std::int64_t q_row = static_cast<std::int64_t>(item.sequence.q_row) + row.query;
    static_cast<float*>(p.lse)[item.b * p.lse_strides.batch + row.head * p.lse_strides.head +
                               q_row * p.lse_strides.row] = lse;
  }
}

/// Four columns of the final output.
template <typename C>
__device__ __forceinline__ void store_result(const AttentionParams& p, const Item& item,
                                             const Row& row, int column, const float (&x)[4]) {
  using T = typename C::Element;
  const std::int64_t q_row = static_cast<std::int64_t>(item.sequence.q_row) + row.query;
  const std::int64_t offset =
      item.b * p.out_strides.batch + row.head * p.out_strides.head + q_row * p.out_strides.row;
  if (p.out_element == core::Element::f32) {
    store_columns(static_cast<float*>(p.out) + offset, p.out_strides.column, column, p.v_dim, x,
                  p.vector_rows);
  } else {
    store_columns(static_cast<T*>(p.out) + offset, p.out_strides.column, column, p.v_dim, x,
                  p.vector_rows);
  }
}

/// Four columns of row r.
template <typename C>
__device__ __forceinline__ void store_output(const Results<C>& s, const AttentionParams& p,
                                             const Item& item, const Row& row, int r, int column) {
  if (p.plant.is(PlantedBug::row_not_written) && row.query == item.sequence.q_len - 1) return;
  float x[4] = {};
#pragma unroll
  for (int w = 0; w < C::kKeyWarps; ++w) {
    const float4 o = *reinterpret_cast<const float4*>(&s.o[w][r][column]);
    const float weight = s.weight[w][r];
    x[0] = fmaf(o.x, weight, x[0]);
    x[1] = fmaf(o.y, weight, x[1]);
    x[2] = fmaf(o.z, weight, x[2]);
    x[3] = fmaf(o.w, weight, x[3]);
  }
  if (p.splits > 1) {
    const std::int64_t partial =
        item.split * core::partial_rows(p) +
        core::partial_row(p, item.b, row.head, item.sequence.q_row, row.query);
    store_columns(static_cast<float*>(p.partial_out) + partial * p.v_dim, 1, column, p.v_dim, x,
                  p.v_dim % 4 == 0);
    return;
  }
  store_result<C>(p, item, row, column, x);
}

// Joining the splits: the last block to arrive reads all partial results of its rows. They come from
// other SMs, so they are read past the L1 cache; waiting for them is all it does, so as many loads
// as possible are under way at once.

/// The weights of one row's partial results take the place of their LSEs; by one warp.
template <typename C>
__device__ __forceinline__ void weigh_splits(float* s_lse, const AttentionParams& p,
                                             const Item& item, const Row& row, int lane) {
  core::SoftmaxState<float> all{core::negative_infinity<float>(), 0.f};
  for (int split = lane; split < p.splits; split += 32) {
    all.max = max_passing_nan(all.max, s_lse[split]);
  }
  all.max = warp_max(all.max);
  float sink = core::negative_infinity<float>();
  if (p.sinks != nullptr) sink = p.sinks[row.head * p.sinks_stride];
  all.max = max_passing_nan(all.max, sink);
  for (int split = lane; split < p.splits; split += 32) {
    all.sum += core::combine_exp(s_lse[split], all.max);
  }
  all.sum = warp_sum(all.sum);
  if (p.sinks != nullptr) all.sum += core::combine_exp(sink, all.max);
  for (int split = lane; split < p.splits; split += 32) {
    const float weight = core::combine_exp(s_lse[split], all.max);
    const float factor = p.plant.is(PlantedBug::combine_double_counts)
                             ? weight
                             : core::output_factor(all.sum);
    // Less than 0 marks a part that saw no key: its out is not read.
    s_lse[split] = s_lse[split] == core::negative_infinity<float>() ? -1.f : weight * factor;
  }
  if (lane == 0 && p.lse != nullptr) {
    const std::int64_t q_row = static_cast<std::int64_t>(item.sequence.q_row) + row.query;
    static_cast<float*>(p.lse)[item.b * p.lse_strides.batch + row.head * p.lse_strides.head +
                               q_row * p.lse_strides.row] = core::combined_lse(all);
  }
}

/// Four columns of one row, over all splits in ascending order.
template <typename C>
__device__ __forceinline__ void join_columns(const float* s_weights, const AttentionParams& p,
                                             const Item& item, const Row& row, int column) {
  constexpr int kAtOnce = C::kFewRegisters ? 8 : 16;
  const std::int64_t stride = core::partial_rows(p) * p.v_dim;
  const float* g_part =
      static_cast<const float*>(p.partial_out) +
      core::partial_row(p, item.b, row.head, item.sequence.q_row, row.query) * p.v_dim;
  float x[4] = {};
  for (int begin = 0; begin < p.splits; begin += kAtOnce) {
    float4 part[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      part[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (begin + i < p.splits && s_weights[begin + i] != -1.f) {
        part[i] = load_columns(g_part + (begin + i) * stride, column, p.v_dim);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float weight = begin + i < p.splits ? s_weights[begin + i] : 0.f;
      x[0] = fmaf(weight, part[i].x, x[0]);
      x[1] = fmaf(weight, part[i].y, x[1]);
      x[2] = fmaf(weight, part[i].z, x[2]);
      x[3] = fmaf(weight, part[i].w, x[3]);
    }
  }
  store_result<C>(p, item, row, column, x);
}

/// Counts the item's blocks; the last one joins their results. The counter goes back to 0 by itself:
/// it wraps.
template <typename C>
__device__ __forceinline__ void join_splits(SharedStorage<C>& s, const AttentionParams& p,
                                            const Item& item) {
  __threadfence();  // this thread's results are visible before the counter moves
  __syncthreads();
  if (threadIdx.x == 0) {
    s.last = atomicInc(p.counters + blockIdx.x / p.splits, p.splits - 1) == p.splits - 1;
  }
  __syncthreads();
  if (!s.last) return;
  __threadfence();
  constexpr int kRows = 16, kFours = C::kHeadDim / 4;  // rows at a time
  auto& s_lse = *reinterpret_cast<float(*)[kRows][core::kMaxJoinedSplits]>(s.results.o);
  for (int first = 0; first < item.rows; first += kRows) {
    const int rows = min(kRows, item.rows - first);
    for (int index = threadIdx.x; index < rows * p.splits; index += C::kThreads) {
      const int r = index / p.splits, split = index - r * p.splits;
      const Row& row = s.rows[first + r];
      s_lse[r][split] =
          __ldcg(static_cast<const float*>(p.partial_lse) + split * core::partial_rows(p) +
                 core::partial_row(p, item.b, row.head, item.sequence.q_row, row.query));
    }
    __syncthreads();
    for (int r = threadIdx.x / 32; r < rows; r += C::kWarps) {
      weigh_splits<C>(s_lse[r], p, item, s.rows[first + r], threadIdx.x % 32);
    }
    __syncthreads();
#pragma unroll 1
    for (int index = threadIdx.x; index < rows * kFours; index += C::kThreads) {
      const int r = index / kFours, column = 4 * (index % kFours);
      if (column < p.v_dim) join_columns<C>(s_lse[r], p, item, s.rows[first + r], column);
    }
    __syncthreads();
  }
}

template <typename C>
__device__ __forceinline__ void finish(SharedStorage<C>& s, const Outputs<C>& o,
                                       const AttentionParams& p, const Item& item) {
  __syncthreads();  // Q, K and V are read
  leave_results<C>(s.results, o, s.states[threadIdx.x], Thread<C>(threadIdx.x), item.factor);
  __syncthreads();
  for (int r = threadIdx.x; r < item.rows; r += C::kThreads) {
    finish_row_state<C>(s.results, p, item, s.rows[r], r);
  }
  __syncthreads();
  constexpr int kFours = C::kHeadDim / 4;
#pragma unroll 2
  for (int index = threadIdx.x; index < item.rows * kFours; index += C::kThreads) {
    const int column = 4 * (index % kFours);
    const int r = index / kFours;
    if (column < p.v_dim) store_output<C>(s.results, p, item, s.rows[r], r, column);
  }
  if (p.splits > 1 && p.counters != nullptr) join_splits<C>(s, p, item);
}

// ---------------------------------------------------------------------------------------------
// One item

/// Items in order: key range fastest, then tiles of rows from the last (longest, if causal) to the
/// first, then heads, then batches.
template <typename C>
__device__ __forceinline__ void describe_item(Item& item, const AttentionParams& p,
                                              std::uint32_t index) {
  item.split = static_cast<std::int32_t>(index % p.splits);
  index /= p.splits;
  const std::int32_t tile = p.q_tiles - 1 - static_cast<std::int32_t>(index % p.q_tiles);
  index /= p.q_tiles;
  item.kv_head = static_cast<std::int32_t>(index % p.kv_heads);
  item.b = static_cast<std::int32_t>(index / p.kv_heads);
  item.sequence = core::sequence_of(p, item.b);
  item.first_row = tile * C::kTileQ;
  item.rows = min(C::kTileQ, item.sequence.q_len * p.group - item.first_row);
  if (item.rows <= 0) return;
  const std::int32_t first_query = item.first_row / p.group;
  const std::int32_t last_query = (item.first_row + item.rows - 1) / p.group;
  item.seen = core::intersect(core::keys_seen_by_any(item.sequence.mask, first_query, last_query),
                              core::split_keys(item.split, p.keys_per_split, item.sequence.kv_len));
  item.all = core::intersect(core::keys_seen_by_all(item.sequence.mask, first_query, last_query),
                             item.seen);
  if (item.seen.empty()) item.seen = item.all = {0, 0};
  const std::int64_t kv_head = core::kv_head_of(p, item.kv_head * p.group);
  const auto rows_of = [&](const void* g_data, const core::Strides& strides) {
    return static_cast<const typename C::Element*>(g_data) + item.b * strides.batch +
           kv_head * strides.head + item.sequence.k_row * strides.row;
  };
  item.g_k = rows_of(p.k, p.k_strides);
  item.g_v = rows_of(p.v, p.v_strides);
  item.options = has_score_options(p);
  item.factor = item.options ? 1.f : score_factor(p);
}

/// One step of the online softmax: kKeys keys from row s_key of the tile that begins at key `tile`.
template <typename C, int kKeys, bool kOptions>
__device__ __forceinline__ void attend_keys(SharedStorage<C>& s, const KeyValueTiles<C>& s_tiles,
                                            Outputs<C>& o, const AttentionParams& p,
                                            const Item& item, std::int32_t tile, int s_key) {
  const std::int32_t first_key = tile + s_key;
  if (first_key >= item.seen.end || first_key + kKeys <= item.seen.begin) return;
  const Thread<C> t(not_hoisted(threadIdx.x));
  Scores<C, kKeys> score = {};
  multiply_queries<C, kKeys>(score, s, s_tiles, s_key, t);
  finish_scores<C, kKeys, kOptions>(score, s.rows, t, p, item, first_key);
  softmax<C, kKeys>(score, o, s.states[threadIdx.x], item.factor, p.plant);
  multiply_values<C, kKeys>(o, score, s_tiles, s_key, t);
}

template <typename C>
__device__ __forceinline__ void attend(SharedStorage<C>& s, const AttentionParams& p,
                                       const Item& item) {
  Outputs<C> o = {};
  RowStates<C>& states = s.states[threadIdx.x];
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
    states.of[m][0] = states.of[m][1] = {core::negative_infinity<float>(), 0.f};
  }
  // A row past the end sees nothing, whatever its query: no option reads for it.
  for (int r = threadIdx.x; r < C::kTileQ; r += C::kThreads) {
    s.rows[r] = row_of(p, item, r);
    if (r >= item.rows) s.rows[r].range = {0, 0};
  }
  // Fill all but one pair of the ring; every step has a group of copies, be it empty.
  load_queries<C>(s, p, item);
  const std::int32_t begin = core::tile_begin(item.seen.begin, C::kTileK);
#pragma unroll
  for (int step = 0; step < C::kStages - 1; ++step) {
    const std::int32_t first_key = begin + step * C::kTileK;
    if (first_key < item.seen.end) load_step<C>(s.place_of(first_key), p, item, first_key);
    commit_copies();
  }
#pragma unroll 1
  for (std::int32_t tile = begin; tile < item.seen.end; tile += C::kTileK) {
    wait_copies<C::kStages - 2>();
    __syncthreads();  // everybody's copies of this step are there, and the last step's pair is free
    const std::int32_t ahead = tile + (C::kStages - 1) * C::kTileK;
    if (ahead < item.seen.end) load_step<C>(s.place_of(ahead), p, item, ahead);
    commit_copies();
    const Thread<C> t(not_hoisted(threadIdx.x));
    const KeyValueTiles<C>& s_tiles = s.place_of(tile);
    if (!item.options) {
      attend_keys<C, C::kWarpKeys, false>(s, s_tiles, o, p, item, tile, t.key_warp * C::kWarpKeys);
    } else {
#pragma unroll 1
      for (int n = 0; n < C::kWarpKeys; n += C::kOptionKeys) {
        attend_keys<C, C::kOptionKeys, true>(s, s_tiles, o, p, item, tile,
                                             t.key_warp * C::kWarpKeys + n);
      }
    }
  }
  wait_copies<0>();
  finish<C>(s, o, p, item);
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    attention(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char s_bytes[];
  SharedStorage<C>& s = *reinterpret_cast<SharedStorage<C>*>(s_bytes);
  if (threadIdx.x == 0) {
    describe_item<C>(s.item, p, blockIdx.x);
    report(p, s.item.sequence.error);
  }
  __syncthreads();
  if (s.item.rows > 0) attend<C>(s, p, s.item);  // the same in every thread
}

}  // namespace flashcore::cuda::sm80
