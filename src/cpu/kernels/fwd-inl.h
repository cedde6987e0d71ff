// Attention forward on the CPU: O = softmax(Q K^T) V for one work tile, with online softmax.
//
//   tile    (batch, KV head, tile_q rows, KV split). The rows are the queries of all heads of the
//           GQA group, query-major, so K and V are read once per group.
//   lanes   query rows. Scores are transposed, S^T[key][row], so a row's maximum, sum and rescale
//           are lane-wise and nothing is reduced across lanes.
//   panel   V vectors of rows, whose accumulators fit in registers.
//   files   load-inl.h loads tiles, gemm-inl.h multiplies, score-inl.h modifies scores and applies
//           the softmax; this file has the mainloop and the epilogue.
//
// target_<isa>.cc includes this file once per instruction set. Nothing here may have external
// linkage or come from the standard library: simd.h gives the reason.
#pragma once

#include "core/assert.h"
#include "core/cancel.h"
#include "core/element.h"
#include "core/scratch.h"
#include "core/softmax.h"
#include "cpu/kernel.h"
#include "cpu/kernels/gemm-inl.h"
#include "cpu/kernels/load-inl.h"
#include "cpu/kernels/score-inl.h"
#include "cpu/kernels/simd.h"

namespace flashcore::cpu {
namespace {

template <typename T>
void store_row(const WorkTile<T>& work, std::int32_t row, const T* out_column, int panel_rows) {
  const AttentionParams& p = work.params;
  const std::int32_t i = work.query_of(row), h = work.head_of(row);
  const std::int64_t q_row = static_cast<std::int64_t>(work.sequence.q_row) + i;
  const bool to_partial = p.splits > 1;
  const auto output = [&](std::int32_t column) {
    return core::output_of_keys(out_column[column * panel_rows], work.sum[row]);
  };
  const bool adds_sink = !to_partial || p.fault.is(InjectedFault::sink_in_every_split);
  const auto final = core::finalize_row(core::SoftmaxState<T>{work.max[row], work.sum[row]},
                                        core::sink_of(p, h, adds_sink), p.fault);
  const T factor = final.factor, lse = final.lse(p.fault);
  core::assert_row_state(p, work.sequence, work.b, h, i, final.state, lse);
  for (std::int32_t c = 0; c < p.v_dim; ++c) {
    core::assert_output(p, work.sequence, work.b, h, i, output(c) * factor);
  }
  if (p.fault.is(InjectedFault::row_not_written) && i == work.sequence.q_len - 1) return;

  if (to_partial) {
    const std::int64_t at = work.split * core::partial_rows(p) +
                            core::partial_row(p, work.b, h, work.sequence.q_row, i);
    static_cast<T*>(p.partial_lse)[at] = lse;
    T* out = static_cast<T*>(p.partial_out) + at * p.v_dim;
    for (std::int32_t c = 0; c < p.v_dim; ++c) out[c] = output(c) * factor;
    return;
  }
  const std::int64_t base = core::row_offset(p.out_strides, work.b, h, q_row);
  for (std::int32_t c = 0; c < p.v_dim; ++c) {
    core::store_element(p.out, p.out_element, base + c * p.out_strides.column, output(c) * factor);
  }
  if (p.lse != nullptr) {
    static_cast<T*>(p.lse)[core::row_offset(p.lse_strides, work.b, h, q_row)] = lse;
  }
}

/// V: vectors of rows per panel. kPanelVecs, or 1 for a tile whose rows fit in one vector.
template <int V, typename T, typename Storage>
void mainloop(const WorkTile<T>& work) {
  const AttentionParams& p = work.params;
  constexpr int kRows = V * kLanes<T>;
  const std::int32_t panels = (work.rows + kRows - 1) / kRows;
  load_queries<T, Storage>(work, kRows);
  for (std::int32_t r = 0; r < panels * kRows; ++r) {
    work.max[r] = core::negative_infinity<T>();
    work.sum[r] = T(0);
  }
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(panels) * kRows * p.v_dim; ++i) {
    work.out_tile[i] = T(0);
  }

  const KeyRange visible = core::intersect(
      core::keys_seen_by_any(work.sequence.mask, work.query_of(0), work.query_of(work.rows - 1)),
      core::split_keys(work.split, p.keys_per_split, work.sequence.kv_len));
  const core::KvRowMap kv_row_map = core::kv_row_map(p, work.sequence, work.b);
  const KeyTensor k{p.k, p.k_strides, p.k_element, p.k_scale, p.head_dim};
  const KeyTensor v{p.v, p.v_strides, p.v_element, p.v_scale, p.v_dim};

  // KV tiles begin at multiples of tile_k for every row. Keys that no row of the tile sees are
  // skipped at both ends; their P is exactly 0, so no bit changes.
  for (std::int32_t first_key = visible.empty() ? visible.end
                                                : core::tile_begin(visible.begin, p.tile_k);
       first_key < visible.end; first_key += p.tile_k) {
    if (core::is_set(work.cancel)) return;
    const KeyRange tile = core::intersect(visible, {first_key, first_key + p.tile_k});
    const std::int32_t keys = tile.end - tile.begin;
    load_tile<T, Storage>(work.k_tile, k, work, kv_row_map, tile);
    load_tile<T, Storage>(work.v_tile, v, work, kv_row_map, tile);
    for (std::int32_t panel = 0; panel < panels; ++panel) {
      score_panel<V>(work.scores, work.k_tile, work.q_tile + panel * kRows * p.head_dim, keys,
                     p.head_dim);
      apply_mods_and_mask<V>(work, work.scores, panel * kRows, tile);
      Vec<T> rescale[V];
      softmax_panel<V>(work.scores, keys, work.max + panel * kRows, work.sum + panel * kRows,
                       rescale, p.fault);
      value_panel<V>(work.out_tile + panel * kRows * p.v_dim, work.v_tile, work.scores, rescale,
                     keys, p.v_dim);
    }
  }
  for (std::int32_t row = 0; row < work.rows; ++row) {
    const T* out_column =
        work.out_tile + static_cast<std::int64_t>(row / kRows) * kRows * p.v_dim + row % kRows;
    store_row(work, row, out_column, kRows);
  }
}

/// Order of tiles: split fastest, then rows from the last (longest, if causal) to the first, then
/// KV head, then batch.
template <typename T, typename Storage>
void process_tile(const AttentionParams& params, std::int64_t index, void* scratch,
                  const std::int32_t* cancel) {
  core::spin_if_injected(params.fault, params.q_len);
  const std::int32_t split = static_cast<std::int32_t>(index % params.splits);
  index /= params.splits;
  const std::int32_t tile = params.q_tiles - 1 - static_cast<std::int32_t>(index % params.q_tiles);
  index /= params.q_tiles;
  const std::int32_t kv_head = static_cast<std::int32_t>(index % params.kv_heads);
  const std::int32_t b = static_cast<std::int32_t>(index / params.kv_heads);

  const core::SeqInfo sequence = core::seq_info_of(params, b);
  const std::int64_t group_rows = static_cast<std::int64_t>(sequence.q_len) * params.group;
  const std::int64_t first_row = static_cast<std::int64_t>(tile) * params.tile_q;
  if (first_row >= group_rows) return;
  const std::int64_t rows =
      group_rows - first_row < params.tile_q ? group_rows - first_row : params.tile_q;

  const core::ScratchLayout layout =
      core::scratch_layout(params.tile_q, params.tile_k, params.head_dim, params.v_dim);
  T* s = static_cast<T*>(scratch);
  const WorkTile<T> work{params,
                         cancel,
                         sequence,
                         b,
                         kv_head,
                         split,
                         first_row,
                         static_cast<std::int32_t>(rows),
                         s + layout.q_tile,
                         s + layout.k_tile,
                         s + layout.v_tile,
                         s + layout.scores,
                         s + layout.out_tile,
                         s + layout.max,
                         s + layout.sum};
  if (rows <= kLanes<T>) {
    mainloop<1, T, Storage>(work);
  } else {
    mainloop<kPanelVecs, T, Storage>(work);
  }
}

/// The PeakFunction. `buffer` holds 2 vectors. A load per iteration keeps the compiler from
/// hoisting the product.
double multiply_add_peak(std::int64_t iterations, float* buffer) {
  constexpr int kChains = 12;  // more than two pipes times the latency of an FMA
  Vec<float> acc[kChains];
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) acc[c] = splat(static_cast<float>(c));
  const Vec<float> a = splat(0.999f);
  for (std::int64_t i = 0; i < iterations; ++i) {
    const Vec<float> b = load(buffer + (i & 1) * kLanes<float>);
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) acc[c] = acc[c] + a * b;
  }
#pragma GCC unroll 16
  for (int c = 1; c < kChains; ++c) acc[0] = acc[0] + acc[c];
  store(buffer, acc[0]);
  return 2.0 * kLanes<float> * kChains * static_cast<double>(iterations);
}

inline constexpr IsaKernels kIsaKernels = {process_tile<float, float>, process_tile<float, F16>,
                                           process_tile<float, Bf16>, process_tile<double, double>,
                                           multiply_add_peak};

}  // namespace
}  // namespace flashcore::cpu
