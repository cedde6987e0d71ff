// The online softmax of a step.
#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm90/config.cuh"

namespace flashcore::cuda::sm90 {

/// Row maximum and sum of a thread's two rows. The lanes of a quad hold partial sums until the end.
/// The maximum is in units of S; one unit counts for unit_log2 in the exponent of 2.
struct RowStats {
  core::SoftmaxState<float> of[2];
};

__device__ __forceinline__ RowStats init_row_stats() {
  RowStats row_stats;
  row_stats.of[0] = row_stats.of[1] = {core::negative_infinity<float>(), 0.f};
  return row_stats;
}

/// Stores the final statistics of a work tile in shared memory, summed over the quad and in natural
/// units: natural(max). The next tile starts before O is complete, and registers are few.
template <typename C, typename Natural>
__device__ __forceinline__ void stash_row_stats(SharedStorage<C>& s, const RowStats& row_stats,
                                                const Thread<C>& t, Natural natural) {
  constexpr float kProbability = C::kPScaleLog2 * static_cast<float>(core::kLn2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(row_stats.of[half].sum);
    if (t.lane % 4 == 0) {
      s.final_stats[t.row(half)] = {natural(row_stats.of[half].max) - kProbability, sum};
    }
  }
  __syncwarp();
}

/// visit(i, half) for the elements i of S in a thread's rows kFirst … kFirst + kRows - 1.
template <typename C, int kFirst, int kRows, typename Visit>
__device__ __forceinline__ void for_rows(Visit visit) {
#pragma unroll
  for (int n = 0; n < C::kTileK / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) visit(4 * n + 2 * kFirst + i, kFirst + i / 2);
  }
}

/// Reduces a power of two of values pairwise.
template <int kCount, typename Join>
__device__ __forceinline__ float tree_reduce(float (&x)[kCount], Join join) {
#pragma unroll
  for (int i = kCount / 2; i > 0; i /= 2) {
#pragma unroll
    for (int j = 0; j < i; ++j) x[j] = join(x[j], x[i + j]);
  }
  return x[0];
}

/// max = max(max, row of S), by integer comparison: non-negative floats have the order of their
/// bits, and one instruction compares three integers. Among negative floats the order is reversed.
template <typename C, int kFirst, int kRows>
__device__ __forceinline__ void int_row_max(float (&max)[2][C::kSchedule.max_chains],
                                            const AccS<C>& acc_s) {
  const auto of_pairs = [&](auto visit) {
#pragma unroll
    for (int n = 0; n < C::kTileK / 8; ++n) {
#pragma unroll
      for (int half = kFirst; half < kFirst + kRows; ++half) {
        visit(half, n % C::kSchedule.max_chains, acc_s[4 * n + 2 * half],
              acc_s[4 * n + 2 * half + 1]);
      }
    }
  };
  int top[2][C::kSchedule.max_chains] = {};
  of_pairs([&](int half, int chain, float x, float y) {
    int& highest = top[half][chain];
    highest = __vimax3_s32(highest, __float_as_int(x), __float_as_int(y));
  });
  bool negative = false;
#pragma unroll
  for (int half = kFirst; half < kFirst + kRows; ++half) {
#pragma unroll
    for (int i = 1; i < C::kSchedule.max_chains; ++i)
      top[half][0] = ::max(top[half][0], top[half][i]);
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
    max[half][0] = max_ignore_nan(max[half][0], __int_as_float(top[half][0]));
  }
}

/// Exponent of 2 of a score, for the softmax below: of(score), up to a factor, difference() of two
/// of them, and minus(score, base), which is the difference of of(score) and base. This one takes a
/// single FFMA: a unit of S counts for unit_log2.
struct LinearExponent {
  float unit_log2;

  __device__ __forceinline__ float of(float score) const { return __fmul_rn(score, unit_log2); }
  __device__ __forceinline__ float minus(float score, float base) const {
    return fmaf(score, unit_log2, -base);
  }
  __device__ __forceinline__ float difference(float x, float y) const { return __fsub_rn(x, y); }
};

/// True if an exponent has a term of the row besides: row_term[half].
template <typename Exponent>
constexpr bool has_row_term() {
  return requires(const Exponent& exponent) { exponent.row_term; };
}

/// Scores in units of log2, after score modifications.
struct Log2Exponent {
  __device__ __forceinline__ float of(float score) const { return score; }
  __device__ __forceinline__ float minus(float score, float base) const { return score - base; }
  __device__ __forceinline__ float difference(float x, float y) const { return __fsub_rn(x, y); }
};

/// max = max(row statistics, a lane's part of a row of S) for the rows kFirst … kFirst + kRows - 1
/// of a thread.
template <typename C, int kFirst, int kRows>
__device__ __forceinline__ void lane_row_max(float (&max)[2], const AccS<C>& acc_s,
                                             const RowStats& row_stats) {
  const auto larger = [](float x, float y) { return max_ignore_nan(x, y); };
  float chain_max[2][C::kSchedule.max_chains];
#pragma unroll
  for (int half = kFirst; half < kFirst + kRows; ++half) {
#pragma unroll
    for (float& x : chain_max[half]) x = row_stats.of[half].max;
  }
  if constexpr (C::kSchedule.int_max3) {
    int_row_max<C, kFirst, kRows>(chain_max, acc_s);
  } else {
    for_rows<C, kFirst, kRows>([&](int i, int half) {
      float& x = chain_max[half][(i / 4 * 2 + i % 2) % C::kSchedule.max_chains];
      x = larger(x, acc_s[i]);
    });
  }
#pragma unroll
  for (int half = kFirst; half < kFirst + kRows; ++half) {
    max[half] = tree_reduce(chain_max[half], larger);
  }
}

/// The same for whole rows.
template <typename C, int kFirst, int kRows>
__device__ __forceinline__ void find_row_max(float (&max)[2], const AccS<C>& acc_s,
                                             const RowStats& row_stats) {
  lane_row_max<C, kFirst, kRows>(max, acc_s, row_stats);
#pragma unroll
  for (int half = kFirst; half < kFirst + kRows; ++half) max[half] = quad_max(max[half]);
}

/// P = 2^(exponent - base) in place, and updates the row statistics with the new maxima.
template <typename C, int kFirst, int kRows, typename Exponent>
__device__ __forceinline__ void exponentials(AccS<C>& acc_s, RowStats& row_stats,
                                             float (&rescale)[2], const float (&row_max)[2],
                                             const Exponent& exponent, core::Fault fault) {
  const auto plus = [](float x, float y) { return x + y; };
  float base[2], chain_sum[2][C::kSchedule.sum_chains];
#pragma unroll
  for (int half = kFirst; half < kFirst + kRows; ++half) {
#pragma unroll
    for (float& sum : chain_sum[half]) sum = 0.f;
    core::SoftmaxState<float>& state = row_stats.of[half];
    float max = row_max[half];
    // Per row, so that a row's bits do not depend on its neighbours.
    if (exponent.difference(exponent.of(max), exponent.of(state.max)) <= C::kRescaleThresholdLog2) {
      max = state.max;
    }
    // of() is rounded before it is subtracted, so that a maximum that stays gives exactly 1.
    base[half] = exponent.of(core::softmax_base(max));
    rescale[half] = fast_exp2(exponent.difference(exponent.of(state.max), base[half]));
    base[half] -= C::kPScaleLog2;
    if constexpr (has_row_term<Exponent>()) base[half] -= exponent.row_term[half];
    if (fault.is(InjectedFault::rescale_forgotten)) rescale[half] = 1.f;
    state.max = max;
  }
  const auto add = [&](int i, int half) {
    chain_sum[half][(C::kSchedule.sum_chains == 2 ? i : i / 4) % C::kSchedule.sum_chains] +=
        acc_s[i];
  };
  for_rows<C, kFirst, kRows>([&](int i, int half) {
    acc_s[i] = fast_exp2(exponent.minus(acc_s[i], base[half]));
    if (!C::kSchedule.sum_after_exp) add(i, half);
  });
  if (C::kSchedule.sum_after_exp) for_rows<C, kFirst, kRows>(add);
#pragma unroll
  for (int half = kFirst; half < kFirst + kRows; ++half) {
    row_stats.of[half].sum = core::add_tile_sum(row_stats.of[half].sum, rescale[half],
                                                tree_reduce(chain_sum[half], plus));
  }
}

template <typename C, int kFirst, int kRows, typename Exponent>
__device__ __forceinline__ void softmax_rows(AccS<C>& acc_s, RowStats& row_stats,
                                             float (&rescale)[2], const Exponent& exponent,
                                             core::Fault fault) {
  float max[2];
  find_row_max<C, kFirst, kRows>(max, acc_s, row_stats);
  exponentials<C, kFirst, kRows>(acc_s, row_stats, rescale, max, exponent, fault);
}

/// P = exp(S - max) in place, and updates the row statistics. O must be multiplied by `rescale`.
template <typename C, typename Exponent>
__device__ __forceinline__ void online_softmax(AccS<C>& acc_s, RowStats& row_stats,
                                               float (&rescale)[2], const Exponent& exponent,
                                               core::Fault fault) {
  if constexpr (C::kSchedule.split_rows) {
    softmax_rows<C, 0, 1>(acc_s, row_stats, rescale, exponent, fault);
    softmax_rows<C, 1, 1>(acc_s, row_stats, rescale, exponent, fault);
  } else {
    softmax_rows<C, 0, 2>(acc_s, row_stats, rescale, exponent, fault);
  }
}

/// True if any row of the warp must rescale O. Warp-uniform.
__device__ __forceinline__ bool rescales_any(const float (&rescale)[2]) {
  return __any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f);
}

template <typename C>
__device__ __forceinline__ void rescale_o(AccO<C>& acc_o, const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < C::kHeadDim / 2; ++i) acc_o[i] *= rescale[i / 2 % 2];
}

/// P as A fragments of 16 keys: two n-tiles of S.
template <typename C>
__device__ __forceinline__ void pack_p(std::uint32_t (&p_frag)[C::kTileK / 16][4],
                                       const AccS<C>& acc_s) {
#pragma unroll
  for (int i = 0; i < C::kTileK / 4; ++i) {
    p_frag[i / 4][i % 4] = pack<typename C::Element>(acc_s[2 * i], acc_s[2 * i + 1]);
  }
}

}  // namespace flashcore::cuda::sm90
