// Output and LSE of a warpgroup, straight from its registers.
#pragma once

#include "core/assert.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/ptx.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm90/softmax.cuh"

namespace flashcore::cuda::sm90 {

/// The end of a row's softmax: the factor of its accumulated output.
__device__ __forceinline__ float finish_state(const AttentionParams& p, const Item& item,
                                              core::SoftmaxState<float>& state) {
  float factor = 1.f;
  if (p.sinks != nullptr) {
    factor = core::add_sink(state,
                            p.sinks[item.head * p.sinks_stride] * static_cast<float>(core::kLog2E));
  }
  return factor * (p.plant.is(PlantedBug::empty_row_is_nan) ? 1.f / state.sum
                                                            : fast_output_factor(state.sum));
}

/// Two neighbouring columns of a row, of any layout and format.
template <typename T>
__device__ __forceinline__ void store_pair(const AttentionParams& p, std::int64_t offset, int column,
                                           float low, float high) {
  const float x[2] = {low, high};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (column + i >= p.v_dim) continue;
    const std::int64_t at = offset + (column + i) * p.out_strides.column;
    if (p.out_element == core::Element::f32) {
      static_cast<float*>(p.out)[at] = x[i];
    } else {
      from_float(static_cast<T*>(p.out)[at], x[i]);
    }
  }
}

template <typename C>
__device__ __forceinline__ void write_results(Outputs<C>& o, const RowStates& states,
                                              const AttentionParams& p, const Item& item,
                                              const Thread<C>& t, float score_factor) {
  using T = typename C::Element;
  const bool odd = t.lane % 2 != 0;
  const bool vectors = p.vector_rows && p.out_element != core::Element::f32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = t.row(half);
    const std::int32_t query = item.first_row + r;
    core::SoftmaxState<float> state{states.of[half].max * score_factor,
                                    quad_sum(states.of[half].sum)};
    const float factor = finish_state(p, item, state);
    const bool left_out =
        p.plant.is(PlantedBug::row_not_written) && query == item.sequence.q_len - 1;
    const bool written = r < item.rows && !left_out;
    const std::int64_t row = static_cast<std::int64_t>(item.sequence.q_row) + query;
    float lse = core::log_sum_exp(state);
    if (p.plant.is(PlantedBug::lse_in_base_2)) lse *= static_cast<float>(core::kLog2E);
    if (written) {
      core::assert_row_state(p, item.sequence, item.b, item.head, query, state, lse);
    }
    if (written && p.lse != nullptr && t.lane % 4 == 0) {
      static_cast<float*>(p.lse)[item.b * p.lse_strides.batch + item.head * p.lse_strides.head +
                                 row * p.lse_strides.row] = lse;
    }
    const std::int64_t offset =
        item.b * p.out_strides.batch + item.head * p.out_strides.head + row * p.out_strides.row;
    // Neighbouring lanes exchange columns, so that each has four in a row and a quad writes all of
    // a 32-byte sector: lane 0 of a quad has columns 0-3 of the first n-tile of two, lane 2 its
    // columns 4-7; lanes 1 and 3 those of the second.
    const int column = 8 * (t.lane % 2) + 4 * (t.lane % 4 / 2);
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 8; n += 2) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = o[4 * (n + i / 2) + 2 * half + i % 2] * factor;
        if (written) core::assert_output(p, item.sequence, item.b, item.head, query, x[i]);
      }
      if (vectors) {
        const std::uint32_t first = pack<T>(x[0], x[1]), second = pack<T>(x[2], x[3]);
        const std::uint32_t theirs = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
        if (written && 8 * n + column < p.v_dim) {
          *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + offset + 8 * n + column) =
              odd ? make_uint2(theirs, second) : make_uint2(first, theirs);
        }
      } else if (written) {
        store_pair<T>(p, offset, t.column(n, 0), x[0], x[1]);
        store_pair<T>(p, offset, t.column(n + 1, 0), x[2], x[3]);
      }
    }
  }
}

}  // namespace flashcore::cuda::sm90
