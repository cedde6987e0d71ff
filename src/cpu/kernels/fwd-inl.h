// Attention forward on the CPU: O = softmax(Q K^T) V for one work tile, with online softmax.
//
//   tile    (batch, KV head, tile_q rows, KV split). The rows are the queries of all heads of the
//           GQA group, query-major, so K and V are read once per group.
//   lanes   query rows. Scores are transposed, S^T[key][row], so a row's maximum, sum and rescale
//           are lane-wise and nothing is reduced across lanes.
//   panel   V vectors of rows, whose accumulators fit in registers.
//   files   gemm-inl.h packs and multiplies operands, load-inl.h reads Q, K and V, score-inl.h
//           modifies scores and updates row statistics; this file has the mainloop and the
//           epilogue.
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

/// Converts and stores a row. The loops over contiguous rows have a constant format, so that the
/// compiler vectorises them.
template <typename T>
void store_values(void* out, core::Element element, std::int64_t base, std::int64_t stride,
                  const T* values, std::int32_t count) {
  const auto store_all = [&]<core::Element kElement>() {
    for (std::int32_t c = 0; c < count; ++c) {
      core::store_element(out, kElement, base + c, values[c]);
    }
  };
  if (stride != 1) {
    for (std::int32_t c = 0; c < count; ++c) {
      core::store_element(out, element, base + c * stride, values[c]);
    }
    return;
  }
  switch (element) {
    case core::Element::f64: return store_all.template operator()<core::Element::f64>();
    case core::Element::f32: return store_all.template operator()<core::Element::f32>();
    case core::Element::f16: return store_all.template operator()<core::Element::f16>();
    default: return store_all.template operator()<core::Element::bf16>();
  }
}

/// The place and the factor of a row's output. Null: the row is not written.
template <typename T>
struct OutputRow {
  void* out;
  core::Element element;
  std::int64_t base, stride;
  T factor;
};

/// Finishes the row's state and stores its LSE.
template <typename T>
OutputRow<T> store_row_lse(const WorkTile<T>& work, std::int32_t row) {
  const AttentionParams& p = work.params;
  const std::int32_t i = work.query_of(row), h = work.head_of(row);
  const std::int64_t q_row = static_cast<std::int64_t>(work.sequence.q_row) + i;
  const bool to_partial = p.splits > 1;
  const bool adds_sink = !to_partial || p.fault.is(InjectedFault::sink_in_every_split);
  const auto final = core::finalize_row(core::SoftmaxState<T>{work.max[row], work.sum[row]},
                                        core::sink_of(p, h, adds_sink), p.fault);
  const T lse = final.lse(p.fault);
  core::assert_row_state(p, work.sequence, work.b, h, i, final.state, lse);
  if (p.fault.is(InjectedFault::row_not_written) && i == work.sequence.q_len - 1) return {};
  if (to_partial) {
    const std::int64_t at = work.split * core::partial_rows(p) +
                            core::partial_row(p, work.b, h, work.sequence.q_row, i);
    static_cast<T*>(p.partial_lse)[at] = lse;
    return {p.partial_out, sizeof(T) == 8 ? core::Element::f64 : core::Element::f32, at * p.v_dim,
            1, final.factor};
  }
  if (p.lse != nullptr) {
    static_cast<T*>(p.lse)[core::row_offset(p.lse_strides, work.b, h, q_row)] = lse;
  }
  return {p.out, p.out_element, core::row_offset(p.out_strides, work.b, h, q_row),
          p.out_strides.column, final.factor};
}

/// Stores columns [first, first + count) of a row.
template <typename T>
void store_columns(const WorkTile<T>& work, std::int32_t row, const OutputRow<T>& target,
                   std::int32_t first, const T* values, std::int32_t count) {
  for (std::int32_t c = 0; c < count; ++c) {
    core::assert_output(work.params, work.sequence, work.b, work.head_of(row), work.query_of(row),
                        values[c]);
  }
  if (target.out == nullptr) return;
  store_values(target.out, target.element, target.base + first * target.stride, target.stride,
               values, count);
}

/// Stores a row whose output is contiguous.
template <typename T>
void store_row(const WorkTile<T>& work, std::int32_t row, const T* out) {
  const OutputRow<T> target = store_row_lse(work, row);
  T values[kMaxDim];
  for (std::int32_t c = 0; c < work.params.v_dim; ++c) {
    values[c] = core::output_of_keys(out[c], work.sum[row]) * target.factor;
  }
  store_columns(work, row, target, 0, values, work.params.v_dim);
}

/// Stores a vector of rows from first_row on, whose output is out[column * stride].
template <typename T>
void store_row_vector(const WorkTile<T>& work, std::int32_t first_row, const T* out,
                      std::int32_t stride) {
  constexpr std::int32_t kRows = kLanes<T>;
  const std::int32_t v_dim = work.params.v_dim;
  const std::int32_t rows = work.rows - first_row < kRows ? work.rows - first_row : kRows;
  OutputRow<T> target[kRows];
  T factor[kRows] = {}, has_keys[kRows] = {};
  for (std::int32_t r = 0; r < rows; ++r) {
    target[r] = store_row_lse(work, first_row + r);
    factor[r] = target[r].factor;
    has_keys[r] = core::output_of_keys(T(1), work.sum[first_row + r]);
  }
  for (std::int32_t first = 0; first < v_dim; first += kRows) {
    const std::int32_t columns = v_dim - first < kRows ? v_dim - first : kRows;
    Vec<T> column[kRows];
    for (std::int32_t c = 0; c < kRows; ++c) {
      const Vec<T> sum = c < columns ? load(out + (first + c) * stride) : splat(T(0));
      column[c] = select_less(splat(T(0)), load(has_keys), sum, splat(T(0))) * load(factor);
    }
    T values[kRows * kRows];
    store_transposed<T>(values, kRows, column);
    for (std::int32_t r = 0; r < rows; ++r) {
      store_columns(work, first_row + r, target[r], first, values + r * kRows, columns);
    }
  }
}

/// V: vectors of rows per panel. Gemm::kPanelVecs, or 1 for a tile whose rows fit in one vector.
template <int V, typename Gemm, typename T>
void mainloop(const WorkTile<T>& work) {
  const AttentionParams& p = work.params;
  constexpr int kRows = V * kLanes<T>;
  const std::int32_t panels = (work.rows + kRows - 1) / kRows;
  const std::int64_t panel_size = kRows * core::padded_dim(Gemm::kOperands, p.v_dim);
  Gemm::template pack_q<V>(work);
  for (std::int32_t r = 0; r < panels * kRows; ++r) {
    work.max[r] = core::negative_infinity<T>();
    work.sum[r] = T(0);
  }
  for (std::int64_t i = 0; i < panels * panel_size; ++i) work.out_tile[i] = T(0);

  const KeyRange visible = visible_to_tile(work);
  const core::KvRowMap kv_row_map = core::kv_row_map(p, work.sequence, work.b);
  const KeyTensor k = k_tensor(p), v = v_tensor(p);

  // KV tiles begin at multiples of tile_k for every row. Keys that no row of the tile sees are
  // skipped at both ends; their P is exactly 0, so no bit changes. A GEMM that adds groups of keys
  // starts at a group, so that no row's groups depend on other rows.
  for (std::int32_t first_key = visible.empty() ? visible.end
                                                : core::tile_begin(visible.begin, p.tile_k);
       first_key < visible.end; first_key += p.tile_k) {
    if (core::is_set(work.cancel)) return;
    KeyRange tile = core::intersect(visible, {first_key, first_key + p.tile_k});
    tile.begin = core::tile_begin(tile.begin, Gemm::kKeyStep);
    if (is_hidden_tile(work, tile)) continue;
    Gemm::pack_k(work, k, kv_row_map, tile, visible);
    Gemm::pack_v(work, v, kv_row_map, tile, visible);
    Gemm::template process_panels<V>(work, panels, tile);
  }
  for (std::int32_t row = 0; row < work.rows; row += kLanes<T>) {
    store_row_vector(work, row, work.out_tile + row / kRows * panel_size + row % kRows, kRows);
  }
}

/// The mainloop of a GEMM policy.
template <typename Gemm>
struct PanelLoop {
  using Compute = typename Gemm::Compute;
  static constexpr core::CpuOperands kOperands = Gemm::kOperands;

  static void run(const WorkTile<Compute>& work) {
    Gemm::begin();
    if (work.rows <= kLanes<Compute>) {
      mainloop<1, Gemm>(work);
    } else {
      mainloop<Gemm::kPanelVecs, Gemm>(work);
    }
    Gemm::end();
  }
};

/// Order of tiles: split fastest, then rows from the last (longest, if causal) to the first, then
/// KV head, then batch.
template <typename Loop>
void process_tile(const AttentionParams& params, std::int64_t index, void* scratch,
                  const std::int32_t* cancel) {
  using T = typename Loop::Compute;
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

  const core::ScratchLayout layout = core::scratch_layout(
      Loop::kOperands, params.tile_q, params.tile_k, params.head_dim, params.v_dim);
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
                         s + layout.p_tile,
                         s + layout.scores,
                         s + layout.out_tile,
                         s + layout.max,
                         s + layout.sum};
  Loop::run(work);
}

template <typename T, typename Storage>
inline constexpr TileFunction kFmaTile = process_tile<PanelLoop<FmaGemm<T, Storage>>>;

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

/// The kernels of an instruction set with vector units only.
inline constexpr IsaKernels kFmaKernels = {
    .f32 = kFmaTile<float, float>,
    .f16 = kFmaTile<float, F16>,
    .bf16 = kFmaTile<float, Bf16>,
    .f64 = kFmaTile<double, double>,
    .peak = multiply_add_peak,
};

}  // namespace
}  // namespace flashcore::cpu
