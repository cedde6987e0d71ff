#include "cpu/combine.h"

#include <algorithm>

#include "core/assert.h"
#include "core/cancel.h"
#include "core/element.h"
#include "core/row_offset.h"
#include "cpu/thread_pool.h"

namespace flashcore::cpu {
namespace {

constexpr std::int64_t kRowsPerItem = 16;
constexpr std::int32_t kColumnsAtOnce = 64;

struct Combination {
  const core::CombineParams& params;
  const std::int32_t* cancel;
};

template <typename T>
void combine_row(const Combination& job, std::int64_t b, std::int64_t h, std::int64_t row) {
  const core::CombineParams& p = job.params;
  const core::SoftmaxState<T> state = core::combine_state<T>(p, b, h, row);
  core::assert_combined(p, state, b, h, row);
  const std::int64_t base = core::row_offset(p.out_strides, b, h, row);
  for (std::int32_t first = 0; first < p.v_dim; first += kColumnsAtOnce) {
    if (core::is_set(job.cancel)) return;
    const std::int32_t columns = std::min(kColumnsAtOnce, p.v_dim - first);
    T sum[kColumnsAtOnce] = {};
    for (std::int32_t part = 0; part < p.parts; ++part) {
      if (core::partial_is_empty<T>(p, part, b, h, row)) continue;
      const T weight = core::combine_weight(p, state, part, b, h, row);
      std::int64_t stride;
      const T* out = core::partial_out_row<T>(p, part, b, h, row, stride) + first * stride;
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

template <typename T>
void combine_item(void* context, std::int64_t item, int /*slot*/) {
  const Combination& job = *static_cast<const Combination*>(context);
  const core::CombineParams& p = job.params;
  const std::int64_t rows = static_cast<std::int64_t>(p.batch) * p.q_heads * p.rows;
  const std::int64_t end = std::min((item + 1) * kRowsPerItem, rows);
  for (std::int64_t r = item * kRowsPerItem; r < end; ++r) {
    const std::int64_t row = r % p.rows;
    if (core::combine_skips_row(p, row)) continue;
    combine_row<T>(job, r / p.rows / p.q_heads, r / p.rows % p.q_heads, row);
  }
}

}  // namespace

void combine(const core::CombineParams& params, DType partials, int threads,
             const std::int32_t* cancel) noexcept {
  const std::int64_t rows = static_cast<std::int64_t>(params.batch) * params.q_heads * params.rows;
  const std::int64_t items = (rows + kRowsPerItem - 1) / kRowsPerItem;
  Combination job{params, cancel};
  parallel_for(threads, items, partials == DType::f64 ? combine_item<double> : combine_item<float>,
               &job, cancel);
}

}  // namespace flashcore::cpu
