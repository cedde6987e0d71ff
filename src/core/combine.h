// The weights of partial results in their combination. The backends only iterate over them.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "core/row_offset.h"
#include "core/softmax.h"

namespace flashcore::core {

inline constexpr int kMaxCombineTable = 32;

struct PartialResult {
  const void* out;  // [batch, q_heads, rows, v_dim]
  const void* lse;  // [batch, q_heads, rows], natural logarithm; -inf: out is not read
  Strides out_strides, lse_strides;
};

/// Up to kMaxCombineTable results at any address; or (stacked) any number at equal distances from
/// table[0]; or any number in long_table. A varlen q is one batch entry of total_q rows.
struct CombineParams {
  PartialResult table[kMaxCombineTable];
  std::int64_t stacked_out_stride, stacked_lse_stride;  // elements
  bool stacked;
  std::int32_t parts;
  std::int32_t batch, q_heads, rows, v_dim;
  const std::int32_t* cu_seqlens_q;  // or null; rows outside [cu[0], cu[sequences]) are skipped
  std::int32_t sequences;
  void* out;  // [batch, q_heads, rows, v_dim]
  void* lse;  // [batch, q_heads, rows] or null; the type of the partials
  Strides out_strides, lse_strides;
  Element out_element;
  const float* sinks;  // [q_heads] or null
  std::int64_t sinks_stride;
  Fault fault;
  const PartialResult* long_table;  // [parts] or null; in place of table, on the same device
};

/// The same arguments, read through long_table. A type of its own keeps that test out of the kernel
/// that combines splits.
struct LongCombineParams : CombineParams {};

FLASHCORE_HD const PartialResult& partial_at(const CombineParams& p, std::int32_t part) {
  return p.table[p.stacked ? 0 : part];
}
FLASHCORE_HD const PartialResult& partial_at(const LongCombineParams& p, std::int32_t part) {
  return p.long_table[part];
}

template <typename T, typename Params>
FLASHCORE_HD T partial_lse(const Params& p, std::int32_t part, std::int64_t b, std::int64_t h,
                           std::int64_t row) {
  const PartialResult& r = partial_at(p, part);
  return static_cast<const T*>(
      r.lse)[(p.stacked ? part * p.stacked_lse_stride : 0) + row_offset(r.lse_strides, b, h, row)];
}

/// The row of one partial's out; element c is at [c * column_stride].
template <typename T, typename Params>
FLASHCORE_HD const T* partial_out_row(const Params& p, std::int32_t part, std::int64_t b,
                                      std::int64_t h, std::int64_t row,
                                      std::int64_t& column_stride) {
  const PartialResult& r = partial_at(p, part);
  column_stride = r.out_strides.column;
  return static_cast<const T*>(r.out) + (p.stacked ? part * p.stacked_out_stride : 0) +
         row_offset(r.out_strides, b, h, row);
}

FLASHCORE_HD bool combine_skips_row(const CombineParams& p, std::int64_t row) {
  return p.cu_seqlens_q != nullptr &&
         (row < p.cu_seqlens_q[0] || row >= p.cu_seqlens_q[p.sequences]);
}

/// True for a partial without keys: its out may be unwritten and must not be read. A weight that
/// underflows to 0 does not skip the read, because 0 · NaN must stay NaN.
template <typename T, typename Params>
FLASHCORE_HD bool partial_is_empty(const Params& p, std::int32_t part, std::int64_t b,
                                   std::int64_t h, std::int64_t row) {
  return partial_lse<T>(p, part, b, h, row) == negative_infinity<T>();
}

/// Σ exp(lse_i) over the partials in ascending order, and the sink, as (max, sum).
template <typename T, typename Params>
FLASHCORE_HD SoftmaxState<T> combine_state(const Params& p, std::int64_t b, std::int64_t h,
                                           std::int64_t row) {
  SoftmaxState<T> state{negative_infinity<T>(), T(0)};
  for (std::int32_t part = 0; part < p.parts; ++part) {
    const T lse = partial_lse<T>(p, part, b, h, row);
    if (lse > state.max) state.max = lse;
  }
  T sink = negative_infinity<T>();
  if (p.sinks != nullptr) {
    sink = static_cast<T>(p.sinks[h * p.sinks_stride]);
    if (sink > state.max) state.max = sink;
  }
  for (std::int32_t part = 0; part < p.parts; ++part) {
    state.sum += partial_weight(partial_lse<T>(p, part, b, h, row), state.max);
  }
  if (p.sinks != nullptr) state.sum += partial_weight(sink, state.max);
  return state;
}

/// The factor of one partial's out in the combined out.
template <typename T, typename Params>
FLASHCORE_HD T combine_weight(const Params& p, const SoftmaxState<T>& state, std::int32_t part,
                              std::int64_t b, std::int64_t h, std::int64_t row) {
  const T weight = partial_weight(partial_lse<T>(p, part, b, h, row), state.max);
  if (p.fault.is(InjectedFault::combine_double_counts)) return weight * weight;
  return weight * output_factor(state.sum);
}

}  // namespace flashcore::core
