#include "cpu/combine.h"

#include <algorithm>

#include "core/assert.h"
#include "core/cancel.h"
#include "core/element.h"
#include "core/row_offset.h"
#include "cpu/thread_pool.h"

namespace flashcore::cpu {
namespace {

constexpr std::int64_t kRowsPerTask = 16;
constexpr std::int32_t kColumnsPerPass = 64;

template <typename Params>
struct CombineJob {
  const Params& params;
  const std::int32_t* cancel;
};

template <typename T, typename Params>
void combine_row(const CombineJob<Params>& job, std::int64_t b, std::int64_t h, std::int64_t row) {
  const Params& p = job.params;
  const core::SoftmaxState<T> state = core::combine_state<T>(p, b, h, row);
  core::assert_combined(p, state, b, h, row);
  const std::int64_t base = core::row_offset(p.out_strides, b, h, row);
  for (std::int32_t first = 0; first < p.v_dim; first += kColumnsPerPass) {
    if (core::is_set(job.cancel)) return;
    const std::int32_t columns = std::min(kColumnsPerPass, p.v_dim - first);
    T sum[kColumnsPerPass] = {};
    for (std::int32_t partial = 0; partial < p.parts; ++partial) {
      if (core::partial_is_empty<T>(p, partial, b, h, row)) continue;
      const T weight = core::combine_weight(p, state, partial, b, h, row);
      std::int64_t stride;
      const T* out = core::partial_out_row<T>(p, partial, b, h, row, stride) + first * stride;
      for (std::int32_t c = 0; c < columns; ++c) sum[c] += weight * out[c * stride];
    }
    for (std::int32_t c = 0; c < columns; ++c) {
      core::store_element(p.out, p.out_element, base + (first + c) * p.out_strides.column, sum[c]);
    }
  }
  if (p.lse != nullptr) {
    static_cast<T*>(p.lse)[core::row_offset(p.lse_strides, b, h, row)] = core::log_sum_exp(state);
  }
}

template <typename T, typename Params>
void combine_rows(void* context, std::int64_t task, int /*slot*/) {
  const CombineJob<Params>& job = *static_cast<const CombineJob<Params>*>(context);
  const Params& p = job.params;
  const std::int64_t rows = static_cast<std::int64_t>(p.batch) * p.q_heads * p.rows;
  const std::int64_t end = std::min((task + 1) * kRowsPerTask, rows);
  for (std::int64_t r = task * kRowsPerTask; r < end; ++r) {
    const std::int64_t row = r % p.rows;
    if (core::combine_skips_row(p, row)) continue;
    combine_row<T>(job, r / p.rows / p.q_heads, r / p.rows % p.q_heads, row);
  }
}

template <typename Params>
void combine_in_parallel(const Params& params, DType partials, int threads,
                         const std::int32_t* cancel) noexcept {
  const std::int64_t rows = static_cast<std::int64_t>(params.batch) * params.q_heads * params.rows;
  const std::int64_t tasks = (rows + kRowsPerTask - 1) / kRowsPerTask;
  CombineJob<Params> job{params, cancel};
  parallel_for(threads, tasks,
               partials == DType::f64 ? combine_rows<double, Params> : combine_rows<float, Params>,
               &job, cancel);
}

}  // namespace

void combine(const core::CombineParams& params, DType partials, int threads,
             const std::int32_t* cancel) noexcept {
  if (params.long_table == nullptr) return combine_in_parallel(params, partials, threads, cancel);
  combine_in_parallel(core::LongCombineParams{params}, partials, threads, cancel);
}

}  // namespace flashcore::cpu
