// The online softmax of a step.
#pragma once

#include "cuda/primitives/ptx.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm90/config.cuh"

namespace flashcore::cuda::sm90 {

/// A thread's two rows. Sums are spread over the four lanes of a quad until the end; a maximum is
/// kept in the units of the scores: log2_unit is the base-2 exponent that one of them counts for.
struct RowStates {
  core::SoftmaxState<float> of[2];
};

__device__ __forceinline__ RowStates fresh_states() {
  RowStates states;
  states.of[0] = states.of[1] = {core::negative_infinity<float>(), 0.f};
  return states;
}

/// Leaves an item's final states in shared memory, whole and in natural units: the next item begins
/// before its output is there, and registers are few.
template <typename C>
__device__ __forceinline__ void leave_states(SharedStorage<C>& s, const RowStates& states,
                                             const Thread<C>& t, float unit) {
  constexpr float kProbability = C::kProbabilityLog2 * static_cast<float>(core::kLn2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(states.of[half].sum);
    if (t.lane % 4 == 0) {
      s.ended[t.row(half)] = {states.of[half].max * unit - kProbability, sum};
    }
  }
  __syncwarp();
}

/// All of x, a power of two of them, joined pairwise.
template <int kCount, typename Join>
__device__ __forceinline__ float joined(float (&x)[kCount], Join join) {
#pragma unroll
  for (int i = kCount / 2; i > 0; i /= 2) {
#pragma unroll
    for (int j = 0; j < i; ++j) x[j] = join(x[j], x[i + j]);
  }
  return x[0];
}

/// The larger ones of max and a row's scores. Floats that are not negative have the order of their
/// bits, and one instruction compares three integers; of negative ones the smallest is the largest.
template <typename C, int kFirst, int kRows>
__device__ __forceinline__ void largest_by_bits(float (&max)[2][C::kForm.maxima],
                                                const Scores<C>& score) {
  const auto of_pairs = [&](auto visit) {
#pragma unroll
    for (int n = 0; n < C::kTileK / 8; ++n) {
#pragma unroll
      for (int half = kFirst; half < kFirst + kRows; ++half) {
        visit(half, n % C::kForm.maxima, score[4 * n + 2 * half], score[4 * n + 2 * half + 1]);
      }
    }
  };
  int top[2][C::kForm.maxima] = {};
  of_pairs([&](int half, int chain, float x, float y) {
    int& highest = top[half][chain];
    highest = __vimax3_s32(highest, __float_as_int(x), __float_as_int(y));
  });
  bool negative = false;
#pragma unroll
  for (int half = kFirst; half < kFirst + kRows; ++half) {
#pragma unroll
    for (int i = 1; i < C::kForm.maxima; ++i) top[half][0] = ::max(top[half][0], top[half][i]);
    negative = negative || (top[half][0] == 0 && max[half][0] < 0.f);
  }
  if (negative) {  // all scores of a row
    unsigned low[2] = {~0u, ~0u};
    of_pairs([&](int half, int, float x, float y) {
      low[half] = __vimin3_u32(low[half], __float_as_uint(x), __float_as_uint(y));
    });
#pragma unroll
    for (int half = kFirst; half < kFirst + kRows; ++half) {
      if (top[half][0] == 0) top[half][0] = static_cast<int>(low[half]);
    }
  }
#pragma unroll
  for (int half = kFirst; half < kFirst + kRows; ++half) {
    max[half][0] = max_passing_nan(max[half][0], __int_as_float(top[half][0]));
  }
}

/// The softmax of a thread's rows kFirst … kFirst + kRows - 1. A plain problem's exponentials take
/// one fused instruction. Options bring scores near the largest number of f32, whose product with
/// log2(e) would overflow: there the maximum is subtracted first.
template <typename C, bool kPlain, int kFirst, int kRows>
__device__ __forceinline__ void weigh_rows(Scores<C>& score, RowStates& states, float (&rescale)[2],
                                           float log2_unit, core::Plant plant) {
  const auto of_rows = [](auto visit) {  // their scores
#pragma unroll
    for (int n = 0; n < C::kTileK / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2 * kRows; ++i) visit(4 * n + 2 * kFirst + i, kFirst + i / 2);
    }
  };
  const auto larger = [](float x, float y) { return max_passing_nan(x, y); };
  const auto plus = [](float x, float y) { return x + y; };
  float maxima[2][C::kForm.maxima], base[2], sums[2][C::kForm.sums];
#pragma unroll
  for (int half = kFirst; half < kFirst + kRows; ++half) {
#pragma unroll
    for (float& max : maxima[half]) max = states.of[half].max;
#pragma unroll
    for (float& sum : sums[half]) sum = 0.f;
  }
  if constexpr (C::kForm.by_bits) {
    largest_by_bits<C, kFirst, kRows>(maxima, score);
  } else {
    of_rows([&](int i, int half) {
      float& max = maxima[half][(i / 4 * 2 + i % 2) % C::kForm.maxima];
      max = larger(max, score[i]);
    });
  }
#pragma unroll
  for (int half = kFirst; half < kFirst + kRows; ++half) {
    core::SoftmaxState<float>& state = states.of[half];
    float max = quad_max(joined(maxima[half], larger));
    // Decided for each row by itself.
    if ((max - state.max) * log2_unit <= C::kLazyLog2) max = state.max;
    base[half] = core::softmax_base(max);
    if constexpr (kPlain) {
      // Products are rounded before they are subtracted, so that a maximum that stays gives
      // exactly 1.
      base[half] = __fmul_rn(base[half], log2_unit);
      rescale[half] = fast_exp2(__fsub_rn(__fmul_rn(state.max, log2_unit), base[half]));
      base[half] -= C::kProbabilityLog2;
    } else {
      rescale[half] = fast_exp2((state.max - base[half]) * log2_unit);
    }
    if (plant.is(PlantedBug::rescale_forgotten)) rescale[half] = 1.f;
    state.max = max;
  }
  const auto add = [&](int i, int half) {
    sums[half][(C::kForm.sums == 2 ? i : i / 4) % C::kForm.sums] += score[i];
  };
  of_rows([&](int i, int half) {
    score[i] = fast_exp2(kPlain ? fmaf(score[i], log2_unit, -base[half])
                                : fmaf(score[i] - base[half], log2_unit, C::kProbabilityLog2));
    if (!C::kForm.sums_behind) add(i, half);
  });
  if (C::kForm.sums_behind) of_rows(add);
#pragma unroll
  for (int half = kFirst; half < kFirst + kRows; ++half) {
    states.of[half].sum =
        core::add_tile_sum(states.of[half].sum, rescale[half], joined(sums[half], plus));
  }
}

/// Turns scores into probabilities and updates the states; the output has to be multiplied by
/// `rescale`.
template <typename C, bool kPlain>
__device__ __forceinline__ void softmax(Scores<C>& score, RowStates& states, float (&rescale)[2],
                                        float log2_unit, core::Plant plant) {
  if constexpr (C::kForm.rows_apart) {
    weigh_rows<C, kPlain, 0, 1>(score, states, rescale, log2_unit, plant);
    weigh_rows<C, kPlain, 1, 1>(score, states, rescale, log2_unit, plant);
  } else {
    weigh_rows<C, kPlain, 0, 2>(score, states, rescale, log2_unit, plant);
  }
}

/// Whether that changes anything: one answer, and one branch, for all rows of a warp.
__device__ __forceinline__ bool rescales_any(const float (&rescale)[2]) {
  return __any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f);
}

template <typename C>
__device__ __forceinline__ void rescale_output(Outputs<C>& o, const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < C::kHeadDim / 2; ++i) o[i] *= rescale[i / 2 % 2];
}

/// Probabilities as A operands, 16 keys each: two n-tiles of accumulators are one operand.
template <typename C>
__device__ __forceinline__ void pack_probabilities(std::uint32_t (&a)[C::kTileK / 16][4],
                                                   const Scores<C>& score) {
#pragma unroll
  for (int i = 0; i < C::kTileK / 4; ++i) {
    a[i / 4][i % 4] = pack<typename C::Element>(score[2 * i], score[2 * i + 1]);
  }
}

}  // namespace flashcore::cuda::sm90
