// The warpgroups that compute on e4m3 queries, keys and values. Their step is one after the other,
// S = Q K^T, softmax, P V: what one warpgroup waits for, the others fill.
//
//   P       is e4m3 too, times 2^8; scales multiply scores and results, never operands
//   output  tensor cores add 8-bit products with few bits: those of a step go to accumulators of
//           their own, which are added to the output in f32, together with its rescaling
#pragma once

#include "cuda/primitives/hopper.cuh"
#include "cuda/primitives/wgmma.cuh"
#include "cuda/sm90/config.cuh"
#include "cuda/sm90/consumer.cuh"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/score.cuh"
#include "cuda/sm90/softmax.cuh"

namespace flashcore::cuda::sm90 {

/// Four values as e4m3 in one register, the first one lowest.
__device__ __forceinline__ std::uint32_t pack_codes(float x0, float x1, float x2, float x3) {
  std::uint32_t codes;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(codes)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return codes;
}

/// Probabilities as A operands of 32 keys: four n-tiles of accumulators, with the keys at the
/// places where the lane has them (core::key_at).
template <typename C>
__device__ __forceinline__ void pack_code_operands(std::uint32_t (&a)[C::kTileK / 32][4],
                                                   const Scores<C>& score) {
#pragma unroll
  for (int i = 0; i < C::kTileK / 8; ++i) {
    const float* x = &score[8 * (i / 2) + 2 * (i % 2)];
    a[i / 4][i % 4] = pack_codes(x[0], x[1], x[4], x[5]);
  }
}

/// part = P V, of the columns from `first` on, begun.
template <typename C, int kColumns>
__device__ __forceinline__ void begin_part(float (&part)[kColumns / 2],
                                           const std::uint32_t (&a)[C::kTileK / 32][4],
                                           SharedStorage<C>& s, int stage, int first) {
  using V = typename C::ValueTile;
  const std::uint64_t v =
      core::matrix_descriptor(shared_address(s.v[stage]) + first * core::kPanelRowBytes, 0);
  Wgmma<kColumns>::template with_rows<false>(part, a[0], v);
#pragma unroll
  for (int step = 1; step < C::kTileK / 32; ++step) {
    Wgmma<kColumns>::template with_rows<true>(part, a[step], core::advance(v, V::along_rows(step)));
  }
  commit_products();
}

/// o = rescale o + part, where part is there, and has been multiplied by of_values where that is
/// not 1 (kScaled).
template <typename C, int kColumns, bool kScaled>
__device__ __forceinline__ void add_part(Outputs<C>& o, float (&part)[kColumns / 2], int first,
                                         const float (&rescale)[2], float of_values) {
  pin(part);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    float& x = o[first / 2 + i];
    x = fmaf(x, rescale[i / 2 % 2], kScaled ? part[i] * of_values : part[i]);
  }
}

/// What the values of a tile are multiplied by, where blocks of them have scales.
template <typename C>
__device__ __forceinline__ float scale_of_values(const AttentionParams& p, const Item& item,
                                                 std::int32_t tile) {
  if (!p.v_scale.by_rows()) return 1.f;
  return core::row_step(p, p.v_element, p.v_scale, item.b, item.kv_head, tile * C::kTileK);
}

/// Scores times the scales of their keys, which eight neighbours share.
template <typename C>
__device__ __forceinline__ void scale_keys(Scores<C>& score, const AttentionParams& p,
                                           const Item& item, std::int32_t tile) {
  const int head = item.kv_head;
#pragma unroll 1
  for (int n = 0; n < C::kTileK / 8; ++n) {
    const std::int32_t key = min(tile * C::kTileK + 8 * n, item.sequence.kv_len - 1);
    const float scale = core::row_step(p, p.k_element, p.k_scale, item.b, head, key);
#pragma unroll
    for (int m = 0; m < C::kTileK / 8; ++m) {  // registers have no run-time index
      if (m != n) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) score[4 * m + i] *= scale;
    }
  }
}

/// What is the same for all steps of an item.
template <typename C, bool kPlain>
struct CodeItem {
  float common;          // of all scores
  float of_row[2];       // of a thread's rows, where kPlain does not leave it to the softmax
  bool left_to_softmax;  // which takes a unit that is positive
  float unit;            // of the scores that it takes

  CodeItem() = default;
  __device__ __forceinline__ CodeItem(const SharedStorage<C>& s, const AttentionParams& p,
                                      int stage, const Thread<C>& t) {
    const Item& item = s.items[stage];
    common = s.score_factor[stage];
    of_row[0] = of_row[1] = common;
    if (!kPlain && p.q_scale.by_rows()) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int32_t query = min(item.first_query + t.row(half), item.sequence.q_len - 1);
        of_row[half] *= core::row_step(p, p.q_element, p.q_scale, item.b, item.head, query);
      }
    }
    left_to_softmax = kPlain && common > 0.f;
    unit = left_to_softmax ? common : 1.f;
  }

  /// Scores that have just come become probabilities.
  __device__ __forceinline__ void weigh(Scores<C>& score, RowStates& states, float (&rescale)[2],
                                        const Thread<C>& t, const AttentionParams& p,
                                        const Item& item, std::int32_t tile, bool cut) const {
    if (!kPlain && p.k_scale.by_rows()) scale_keys<C>(score, p, item, tile);
    if (kPlain && !left_to_softmax) {
#pragma unroll
      for (int i = 0; i < C::kTileK / 2; ++i) score[i] *= common;
    }
    finish_scores<C, kPlain>(score, t, p, item, tile, cut, [&](int half) { return of_row[half]; });
    softmax<C, kPlain>(score, states, rescale, unit * static_cast<float>(core::kLog2E), p.plant);
  }
};

/// o = rescale o + of_values P V.
template <typename C, bool kScaled>
__device__ __forceinline__ void add_output(Outputs<C>& o,
                                           const std::uint32_t (&a)[C::kTileK / 32][4],
                                           SharedStorage<C>& s, int stage,
                                           const float (&rescale)[2], float of_values) {
  constexpr int kColumns = C::kHeadDim < C::kPartColumns ? C::kHeadDim : C::kPartColumns;
#pragma unroll
  for (int first = 0; first < C::kHeadDim; first += kColumns) {
    float part[kColumns / 2];
    fence_products();
    begin_part<C, kColumns>(part, a, s, stage, first);
    wait_products<0>();
    add_part<C, kColumns, kScaled>(o, part, first, rescale, of_values);
  }
}

/// A consumer warp of e4m3 tensors.
template <typename C, bool kPlain>
struct CodeConsumer : ConsumerWarp<C> {
  using Pipeline = typename C::Pipeline;
  using Position = typename ConsumerWarp<C>::Position;
  static constexpr bool kScoresAhead = C::kShape.scores_ahead();
  std::uint32_t a[C::kTileK / 32][4];
  ItemPlace place;  // of the item
  CodeItem<C, kPlain> steps;

  __device__ __forceinline__ CodeConsumer(SharedStorage<C>& s, const Params& params)
      : ConsumerWarp<C>(s, params, Thread<C>(threadIdx.x)) {}

  __device__ __forceinline__ void begin_item(ItemPlace item) {
    place = item;
    steps = CodeItem<C, kPlain>(this->s, this->params.call, item.stage(), this->t);
    this->states = fresh_states();
#pragma unroll
    for (int i = 0; i < C::kHeadDim / 2; ++i) this->o[i] = 0.f;
  }

  __device__ __forceinline__ void softmax(const Position& at, bool needs_mask) {
    steps.weigh(this->score, this->states, this->rescale, this->t, this->params.call,
                this->item(place), at.tile, needs_mask);
  }
  __device__ __forceinline__ void pack_probabilities() { pack_code_operands<C>(a, this->score); }

  /// o = rescale o + P V.
  __device__ __forceinline__ void add_pv(typename Pipeline::KvPlace values, std::int32_t tile) {
    const float of_values =
        kPlain ? 1.f : scale_of_values<C>(this->params.call, this->item(place), tile);
    add_output<C, !kPlain>(this->o, a, this->s, values.stage(), this->rescale, of_values);
  }

  __device__ __forceinline__ void stash_row_states() {
    leave_states<C>(this->s, this->states, this->t, steps.unit);
  }
  __device__ __forceinline__ void write_item(ItemPlace item) {
    write_results<C>(this->o, this->s, this->params.call, this->item(item), this->t,
                     this->s.output_factor[item.stage()]);
  }
};

}  // namespace flashcore::cuda::sm90
