// Weights of plain steps: scores are only scaled and masked by position, and all operands are
// finite. They are found between the MMAs of products that do not need them.
#pragma once

#include "cuda/sm80/bwd_score.cuh"

namespace flashcore::cuda::sm80 {

/// The factor of scores in powers of 2.
__device__ __forceinline__ float plain_scale(const BackwardParams& p) {
  const bool unscaled = p.fwd.fault.is(InjectedFault::scale_ignored);
  return unscaled ? static_cast<float>(core::kLog2E) : p.fwd.softmax_scale_log2;
}

/// The keys that the queries of a step see, in 32-bit arithmetic.
struct StepMask {
  core::MaskEdges edges;
  std::int32_t queries;  // of the step that exist

  __device__ __forceinline__ StepMask(const BwdWork& work, const BwdStep& step)
      : edges(core::mask_edges(work.seq.mask, step.query)), queries(work.seq.q_len - step.query) {}
  __device__ __forceinline__ KeyRange keys(int query) const {
    if (query >= queries) return {0, 0};
    return {edges.begin + query, min(edges.end + query, edges.last)};
  }
};

/// False if no row of the warp sees a key of the step. For warps that share no rows of A.
template <typename C>
__device__ __forceinline__ bool warp_sees(const BwdWork& work, const BwdThread<C>& t,
                                          const BwdStep& step) {
  bool sees = step.all_visible;
  if (!sees) {
    const StepMask mask(work, step);
    const int first = t.pair_row0(), last = min(first + C::kPairRows, mask.queries) - 1;
    sees = first <= last && mask.keys(first).begin < step.key + C::kStep &&
           step.key < mask.keys(last).end;
  }
  return __any_sync(0xffffffffu, sees);
}

/// Sets the scores of hidden pairs to -inf: their weights become 0.
template <typename C, bool kKeysAreRows>
__device__ __forceinline__ void hide_scores(AccPairs<C>& pairs, const BwdWork& work,
                                            const BwdThread<C>& t, const BwdStep& step) {
  using Map = PairMap<C, kKeysAreRows>;
  const StepMask mask(work, step);
#pragma unroll
  for (int query = 0; query < Map::kQueries; ++query) {
    const KeyRange range = mask.keys(Map::local_query(t, query));
#pragma unroll
    for (int key = 0; key < Map::kKeys; ++key) {
      if (!range.contains(step.key + Map::local_key(t, key))) {
        Map::at(pairs, query, key) = core::negative_infinity<float>();
      }
    }
  }
}

/// Turns S into P and dP into dZ times `unit`, one accumulator tile at a time. Operands that are
/// not finite may make any pair NaN.
template <typename C, bool kKeysAreRows>
struct PlainStep {
  using Map = PairMap<C, kKeysAreRows>;
  static constexpr int kTiles = C::kPairRowTiles * C::kPairColumnTiles;
  float scale_log2, unit;
  float base_log2[Map::kQueries], factor[Map::kQueries], delta[Map::kQueries];

  __device__ __forceinline__ PlainStep(const BwdTiles<C>& s, const BackwardParams& p,
                                       const BwdThread<C>& t, float ds_unit)
      : scale_log2(plain_scale(p)), unit(ds_unit) {
#pragma unroll
    for (int query = 0; query < Map::kQueries; ++query) {
      const int r = Map::local_query(t, query);
      base_log2[query] = s.base[r] * static_cast<float>(core::kLog2E);
      factor[query] = s.factor[r];
    }
  }
  __device__ __forceinline__ void load_delta(const BwdTiles<C>& s, const BwdThread<C>& t) {
#pragma unroll
    for (int query = 0; query < Map::kQueries; ++query) {
      delta[query] = -s.delta[Map::local_query(t, query)] * unit;
    }
  }
  __device__ __forceinline__ static int query_of(int m, int n, int i) {
    return kKeysAreRows ? 2 * n + i % 2 : 2 * m + i / 2;
  }
  __device__ __forceinline__ void find_probabilities(float (&x)[4], int m, int n) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = query_of(m, n, i);
      x[i] = fast_exp2(fmaf(x[i], scale_log2, -base_log2[query])) * factor[query];
    }
  }
  __device__ __forceinline__ void find_gradients(float (&w)[4], const float (&x)[4], int m,
                                                 int n) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = fmaf(w[i], unit, delta[query_of(m, n, i)]) * x[i];
  }
};

/// The first half of a step whose weights pass through shared memory: P and dZ, and acc2 += P B2 in
/// KV tiles. `pairs` is S.
template <typename C, bool kKeysAreRows>
__device__ __forceinline__ void run_plain_step(AccPairs<C>& pairs, BwdTiles<C>& s,
                                               const BackwardParams& p, const BwdThread<C>& t,
                                               float unit, AccGradient<C>& acc2) {
  using Step = PlainStep<C, kKeysAreRows>;
  Step plain(s, p, t, unit);
  constexpr int kColumns = C::kPairColumnTiles, kTiles = Step::kTiles;
  AccPairs<C> d_pairs;
  multiply_rows<C>(d_pairs, s.a2, s.b2[0], t, [&](int part) {
    for_part<kTiles, C::kGemmSteps>(part, [&](int i) {
      float(&x)[4] = pairs[i / kColumns][i % kColumns];
      plain.find_probabilities(x, i / kColumns, i % kColumns);
      if constexpr (kKeysAreRows) store_weights<C>(s.p, x, t, i / kColumns, i % kColumns);
    });
  });
  plain.load_delta(s, t);
  const auto find_gradients = [&](int i) {
    const int m = i / kColumns, n = i % kColumns;
    plain.find_gradients(d_pairs[m][n], pairs[m][n], m, n);
    store_weights<C>(s.dz, d_pairs[m][n], t, m, n);
  };
  if constexpr (kKeysAreRows) {
    // P has been stored by all warps that share it.
    if constexpr (C::kWarpsShareRows) {
      if (t.warp % 2 == 0) {
        named_barrier_sync(kEvenWeights, C::kThreads / 2);
      } else {
        named_barrier_sync(kOddWeights, C::kThreads / 2);
      }
    } else {
      __syncthreads();
    }
    multiply_weights<C>(acc2, s.p, s.b2[0], t, [&](int part) {
      for_part<kTiles, C::kStep / 16 * C::kGroups>(part, find_gradients);
    });
  } else {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) find_gradients(i);
  }
}

/// A step whose weights stay in registers: acc += dZ B1. `pairs` is S.
template <typename C>
__device__ __forceinline__ void run_register_step(AccPairs<C>& pairs, BwdTiles<C>& s,
                                                  const BackwardParams& p, const BwdThread<C>& t,
                                                  float unit, int stage, AccGradient<C>& acc) {
  using Step = PlainStep<C, false>;
  Step plain(s, p, t, unit);
  constexpr int kColumns = C::kPairColumnTiles, kRows = C::kPairRowTiles;
  AccPairs<C> d_pairs;
  const auto find_probabilities = [&](int i) {
    plain.find_probabilities(pairs[i / kColumns][i % kColumns], i / kColumns, i % kColumns);
  };
  multiply_rows<C>(d_pairs, s.a2, s.b2[stage], t, [&](int part) {
    for_part<Step::kTiles, C::kGemmSteps>(part, find_probabilities);
  });
  plain.load_delta(s, t);
  // Tile i of 16 columns of dZ.
  const auto find_gradients = [&](int columns, int i) {
    const int m = i / 2, n = 2 * columns + i % 2;
    plain.find_gradients(d_pairs[m][n], pairs[m][n], m, n);
  };
#pragma unroll
  for (int i = 0; i < 2 * kRows; ++i) find_gradients(0, i);
  multiply_pairs<C>(acc, d_pairs, s.b1[stage], t, [&](int part) {
    const int next = part / C::kGroups + 1;
    if (2 * next >= kColumns) return;
    for_part<2 * kRows, C::kGroups>(part % C::kGroups, [&](int i) { find_gradients(next, i); });
  });
}

}  // namespace flashcore::cuda::sm80
