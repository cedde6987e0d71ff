// Pairs of a step: S and dP become P and dZ (or dS). Options and masks follow core/score.h; the
// keys of a query are selected by its interval (core/mask.h).
//
// A thread visits its pairs query by query, because the options of a query are loaded once. Queries
// are the columns of its accumulators in KV tiles, and the rows in query tiles.
#pragma once

#include "core/score.h"
#include "cuda/primitives/named_barrier.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm80/bwd_mma.cuh"

namespace flashcore::cuda::sm80 {

/// The queries and keys of a thread's pairs, as indices of its accumulators.
template <typename C, bool kKeysAreRows>
struct PairMap {
  static constexpr int kRows = 2 * C::kPairRowTiles, kColumns = 2 * C::kPairColumnTiles;
  static constexpr int kQueries = kKeysAreRows ? kColumns : kRows;
  static constexpr int kKeys = kKeysAreRows ? kRows : kColumns;

  __device__ __forceinline__ static float& at(AccPairs<C>& pairs, int query, int key) {
    const int row = kKeysAreRows ? key : query, column = kKeysAreRows ? query : key;
    return pairs[row / 2][column / 2][2 * (row % 2) + column % 2];
  }
  /// Row of A or B of one of the thread's queries or keys.
  __device__ __forceinline__ static int local_query(const BwdThread<C>& t, int query) {
    return kKeysAreRows ? t.pair_column(query / 2, query % 2) : t.pair_row(query / 2, query % 2);
  }
  __device__ __forceinline__ static int local_key(const BwdThread<C>& t, int key) {
    return kKeysAreRows ? t.pair_row(key / 2, key % 2) : t.pair_column(key / 2, key % 2);
  }
};

/// A step: its query head, and the first query and key of its tile of pairs.
struct BwdStep {
  std::int32_t h, query, key;
  bool all_visible;  // every query sees every key
  bool with_slope;   // dZ is wanted in shared memory; else dS in registers
};

/// The probability of a score. A row without keys has factor 0, and its scores may be NaN.
__device__ __forceinline__ float probability(float score, float base, float factor,
                                             core::Fault fault) {
  constexpr float kLimit = 100.f;  // P is at most 1 if lse belongs to the inputs
  const float power = (score - base) * static_cast<float>(core::kLog2E);
  const float p = fast_exp2(power > kLimit ? kLimit : power) * factor;
  if (fault.is(InjectedFault::empty_row_unguarded)) return p;
  return score == core::negative_infinity<float>() || factor == 0.f ? 0.f : p;
}

/// Bits of a thread's pairs: bit kKeys query + key.
template <typename Map>
struct PairBits {
  static constexpr int kPairs = Map::kQueries * Map::kKeys;
  static_assert(kPairs <= 32);
  std::uint32_t bits;
  __device__ __forceinline__ bool has(int query, int key) const {
    return (bits >> (query * Map::kKeys + key) & 1u) != 0;
  }
  __device__ __forceinline__ void set(int query, int key, bool value) {
    bits |= static_cast<std::uint32_t>(value) << (query * Map::kKeys + key);
  }
};

/// A key of the interval: `key`, if it is in there. A bias or mask has no elements outside, and a
/// load without a condition overlaps others.
__device__ __forceinline__ std::int32_t nearest(const KeyRange& range, std::int32_t key) {
  return max(range.begin, min(key, range.end - 1));
}

/// The pairs that a boolean mask or block mask shows. Bits of keys outside of the queries'
/// intervals have no meaning.
template <typename C, typename Map>
__device__ __forceinline__ PairBits<Map> pairs_in_mask(const BackwardParams& p,
                                                       const BwdTiles<C>& s, const BwdThread<C>& t,
                                                       const BwdStep& step) {
  const core::AttentionParams& f = p.fwd;
  PairBits<Map> shown{};
#pragma unroll 1  // registers are few
  for (int query = 0; query < Map::kQueries; ++query) {
    const int r = Map::local_query(t, query);
    const KeyRange range = s.range[r];
    if (range.empty()) continue;
    const core::ScoreRow<float> row{f, s.work.b, step.h, step.query + r};
    if (f.block_mask.given()) {
      // A thread's keys are in one word of 32.
      const std::int32_t first = step.key + Map::local_key(t, 0);
      if (first < f.kv_len) {
        const std::int32_t entry = f.block_mask.entry(row.block_mask_row(), first);
        const std::uint32_t word = f.block_mask.word(entry, row.query, first);
#pragma unroll
        for (int key = 0; key < Map::kKeys; ++key) {
          shown.set(query, key, (word >> ((step.key + Map::local_key(t, key)) % 32) & 1u) != 0);
        }
      }
    } else {
      const std::uint8_t* g_row = f.mask + row.mask_offset();
#pragma unroll
      for (int key = 0; key < Map::kKeys; ++key) {
        const std::int32_t j = nearest(range, step.key + Map::local_key(t, key));
        shown.set(query, key, g_row[j * f.mask_strides.column] != 0);
      }
    }
  }
  return shown;
}

/// A query row of a thread's pairs. AddBias adds the bias to the scores of the row.
template <typename AddBias>
struct BwdScoreRow : core::ScoreRow<float> {
  AddBias add_bias;
  static constexpr bool has_mask() { return false; }  // pairs_in_mask()
  template <typename Use>
  __device__ __forceinline__ void with_bias(Use) const {
    add_bias(bias_offset());
  }
};

/// Turns S of one query into P, with every option. Multiplies dS by the derivative of the softcap.
/// shown: bits of the mask, if the call has one.
template <typename C, typename Map>
__device__ __forceinline__ void find_probabilities(AccPairs<C>& pairs, AccPairs<C>& d_pairs,
                                                   const BwdTiles<C>& s, const BackwardParams& p,
                                                   const BwdThread<C>& t, const BwdStep& step,
                                                   int query, const PairBits<Map>& shown) {
  const core::AttentionParams& f = p.fwd;
  const int r = Map::local_query(t, query);
  const std::int32_t i = step.query + r;
  const KeyRange range = s.range[r];
  const auto add_bias_as = [&](const auto* g_row) {
    if (range.empty()) return;
#pragma unroll
    for (int key = 0; key < Map::kKeys; ++key) {
      const std::int32_t j = nearest(range, step.key + Map::local_key(t, key));
      Map::at(pairs, query, key) += to_float(g_row[j * f.bias_strides.column]);
    }
  };
  const auto add_bias = [&](std::int64_t offset) {
    if (f.bias_element == core::Element::f32) {
      add_bias_as(static_cast<const float*>(f.bias) + offset);
    } else {
      add_bias_as(static_cast<const typename C::Element*>(f.bias) + offset);
    }
  };
  const BwdScoreRow<decltype(add_bias)> row{{f, s.work.b, step.h, i}, add_bias};
  if (row.has_softcap() && step.with_slope && !f.fault.is(InjectedFault::softcap_slope_ignored)) {
#pragma unroll
    for (int key = 0; key < Map::kKeys; ++key) {
      const float tanh = capped_short(Map::at(pairs, query, key) * row.scale(), 1.f);
      Map::at(d_pairs, query, key) *= 1.f - tanh * tanh;
    }
  }
  core::modify_scores<FastMath, core::ScoreInput::qk>(row, [&](auto change) {
#pragma unroll
    for (int key = 0; key < Map::kKeys; ++key) {
      const std::int32_t j = step.key + Map::local_key(t, key);
      change(Map::at(pairs, query, key), j, static_cast<float>(i + s.work.seq.mask.diagonal - j));
    }
  });
  if (f.has_mask()) {
#pragma unroll
    for (int key = 0; key < Map::kKeys; ++key) {
      if (!shown.has(query, key)) Map::at(pairs, query, key) = core::negative_infinity<float>();
    }
  }
  const float base = s.base[r], factor = s.factor[r];
#pragma unroll
  for (int key = 0; key < Map::kKeys; ++key) {
    float& x = Map::at(pairs, query, key);
    const bool visible = range.contains(step.key + Map::local_key(t, key));
    x = visible ? probability(x, base, factor, f.fault) : 0.f;
  }
}

/// The same for scores that are only scaled and masked by position. special: some may not be
/// finite.
template <typename C, typename Map>
__device__ __forceinline__ void find_plain_probabilities(AccPairs<C>& pairs, const BwdTiles<C>& s,
                                                         float scale_log2, const BwdThread<C>& t,
                                                         const BwdStep& step, int query,
                                                         bool special) {
  const int r = Map::local_query(t, query);
  const float base_log2 = s.base[r] * static_cast<float>(core::kLog2E), factor = s.factor[r];
#pragma unroll
  for (int key = 0; key < Map::kKeys; ++key) {
    float& x = Map::at(pairs, query, key);
    // A score of -inf has weight 0, also if the row's statistics are NaN.
    const bool zero = special && x * scale_log2 == core::negative_infinity<float>();
    x = zero ? 0.f : fast_exp2(fmaf(x, scale_log2, -base_log2)) * factor;
  }
  if (step.all_visible) return;  // uniform over the CTA
  const KeyRange range = s.range[r];
#pragma unroll
  for (int key = 0; key < Map::kKeys; ++key) {
    if (!range.contains(step.key + Map::local_key(t, key))) Map::at(pairs, query, key) = 0.f;
  }
}

/// Adds 0 to a sum of finite numbers, and NaN for any other.
__device__ __forceinline__ void add_probe(float& probe, float x) { probe = fmaf(x, 0.f, probe); }

/// The same for any call and any operands. Weights not wanted in registers go to shared memory: dZ
/// and, in KV tiles, P. True if a score, dP or delta of the warp's pairs is not finite.
template <typename C, bool kFastPath, bool kKeysAreRows>
__device__ __forceinline__ bool finish_pairs(AccPairs<C>& pairs, AccPairs<C>& d_pairs,
                                             BwdTiles<C>& s, const BackwardParams& p,
                                             const BwdThread<C>& t, const BwdStep& step,
                                             float unit) {
  using Map = PairMap<C, kKeysAreRows>;
  const bool unscaled = p.fwd.fault.is(InjectedFault::scale_ignored);
  const float scale_log2 = unscaled ? static_cast<float>(core::kLog2E) : p.fwd.softmax_scale_log2;
  float probe = 0.f;
  [[maybe_unused]] PairBits<Map> shown{};
  if constexpr (!kFastPath) {
    if (p.fwd.has_mask()) shown = pairs_in_mask<C, Map>(p, s, t, step);
  }
#pragma unroll
  for (int two = 0; two < Map::kQueries; two += 2) {  // adjacent queries are packed together
#pragma unroll
    for (int query = two; query < two + 2; ++query) {
      const float delta = -s.delta[Map::local_query(t, query)] * unit;
#pragma unroll
      for (int key = 0; key < Map::kKeys; ++key) {
        float& w = Map::at(d_pairs, query, key);
        w = fmaf(w, unit, delta);
        add_probe(probe, w);
        add_probe(probe, Map::at(pairs, query, key));
      }
      if constexpr (kFastPath) {
        find_plain_probabilities<C, Map>(pairs, s, scale_log2, t, step, query, probe != 0.f);
      } else {
        find_probabilities<C, Map>(pairs, d_pairs, s, p, t, step, query, shown);
      }
      // A pair with weight 0 contributes nothing, even if dP is not finite.
      const bool selects = !kFastPath || !step.all_visible || probe != 0.f;
#pragma unroll
      for (int key = 0; key < Map::kKeys; ++key) {
        const float weight = Map::at(pairs, query, key);
        float& w = Map::at(d_pairs, query, key);
        w = selects && weight == 0.f ? 0.f : w * weight;
      }
    }
    if constexpr (!C::kWeightsInRegisters) {
#pragma unroll
      for (int m = 0; m < C::kPairRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < C::kPairColumnTiles; ++n) {
          if ((kKeysAreRows ? n : m) != two / 2) continue;
          if constexpr (kKeysAreRows) store_weights<C>(s.p, pairs[m][n], t, m, n);
          if (step.with_slope) store_weights<C>(s.dz, d_pairs[m][n], t, m, n);
        }
      }
    }
  }
  return __any_sync(0xffffffffu, probe != 0.f);
}

/// True for an f16 or bf16 infinity or NaN.
template <typename T>
__device__ __forceinline__ bool is_special(std::uint16_t bits) {
  constexpr std::uint16_t kExponent = std::is_same_v<T, __half> ? 0x7c00 : 0x7f80;
  return (bits & kExponent) == kExponent;
}

/// Replaces elements of a row of B that are not finite by 0. True if there were any.
template <typename C>
__device__ __forceinline__ bool clean_row(typename C::Element* s_b, int row) {
  bool found = false;
#pragma unroll 1
  for (int column = 0; column < C::kHeadDim; ++column) {
    const int at = C::TileB::offset(row, column / 8) / 2 + column % 8;
    auto* s_bits = reinterpret_cast<std::uint16_t*>(s_b) + at;
    if (is_special<typename C::Element>(*s_bits)) {
      *s_bits = 0;
      found = true;
    }
  }
  return found;
}

/// A product takes 0 in place of an operand that is not finite: a pair with weight 0 contributes
/// nothing, and the weights of visible pairs are NaN. P does not depend on dout, so NaN is put
/// there.
template <typename C, bool kKeysAreRows>
__device__ __forceinline__ void clean_operands(BwdTiles<C>& s, int stage) {
  const int row = threadIdx.x;
  if (row >= C::kStep) return;
  clean_row<C>(s.b1[stage], row);
  if constexpr (kKeysAreRows) {
    if (!clean_row<C>(s.b2[C::kStagesB2 == 1 ? 0 : stage], row)) return;
#pragma unroll 1
    for (int a = 0; a < C::kTile; ++a) {
      const int at = C::Weights::offset(a, row / 8) / 2 + row % 8;
      auto* s_bits = reinterpret_cast<std::uint16_t*>(s.p) + at;
      if ((*s_bits & 0x7fff) != 0) *s_bits = 0x7fff;
    }
  }
}

}  // namespace flashcore::cuda::sm80
