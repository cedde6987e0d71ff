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
                                                   const AccS<C>& acc_s) {
#pragma unroll
  for (int i = 0; i < C::kTileK / 8; ++i) {
    const float* x = &acc_s[8 * (i / 2) + 2 * (i % 2)];
    a[i / 4][i % 4] = pack_codes(x[0], x[1], x[4], x[5]);
  }
}

/// part = P V, of the columns from `first` on, begun.
template <typename C, int kColumns>
__device__ __forceinline__ void issue_pv_slice(float (&part)[kColumns / 2],
                                               const std::uint32_t (&a)[C::kTileK / 32][4],
                                               SharedStorage<C>& s, int stage, int first) {
  using V = typename C::ValueTile;
  const std::uint64_t v =
      core::matrix_descriptor(shared_address(s.v[stage]) + first * core::kPanelRowBytes, 0);
  Wgmma<kColumns>::template rs_b_k_major<false>(part, a[0], v);
#pragma unroll
  for (int step = 1; step < C::kTileK / 32; ++step) {
    Wgmma<kColumns>::template rs_b_k_major<true>(part, a[step],
                                                 core::advance(v, V::k_offset(step)));
  }
  wgmma_commit();
}

/// o = rescale o + part, where part is there, and has been multiplied by of_values where that is
/// not 1 (kScaled).
template <typename C, int kColumns, bool kScaled>
__device__ __forceinline__ void accumulate_pv_slice(AccO<C>& acc_o, float (&part)[kColumns / 2],
                                                    int first, const float (&rescale)[2],
                                                    float of_values) {
  fence_registers(part);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    float& x = acc_o[first / 2 + i];
    x = fmaf(x, rescale[i / 2 % 2], kScaled ? part[i] * of_values : part[i]);
  }
}

/// What the values of a tile are multiplied by, where blocks of them have scales.
template <typename C>
__device__ __forceinline__ float scale_of_values(const AttentionParams& p, const WorkTile& item,
                                                 std::int32_t tile) {
  if (!p.v_scale.is_per_block()) return 1.f;
  return core::row_scale(p, p.v_element, p.v_scale, item.b, item.kv_head, tile * C::kTileK);
}

/// Scores times the scales of their keys, which eight neighbours share.
template <typename C>
__device__ __forceinline__ void scale_keys(AccS<C>& acc_s, const AttentionParams& p,
                                           const WorkTile& item, std::int32_t tile) {
  const int head = item.kv_head;
#pragma unroll 1
  for (int n = 0; n < C::kTileK / 8; ++n) {
    const std::int32_t key = min(tile * C::kTileK + 8 * n, item.seq.kv_len - 1);
    const float scale = core::row_scale(p, p.k_element, p.k_scale, item.b, head, key);
#pragma unroll
    for (int m = 0; m < C::kTileK / 8; ++m) {  // registers have no run-time index
      if (m != n) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) acc_s[4 * m + i] *= scale;
    }
  }
}

/// What is the same for all steps of an item.
template <typename C, bool kFastPath>
struct Fp8WorkTile {
  float common;          // of all scores
  float of_row[2];       // of a thread's rows, where kFastPath does not leave it to the softmax
  bool left_to_softmax;  // which takes a unit that is positive
  float unit;            // of the scores that it takes

  Fp8WorkTile() = default;
  __device__ __forceinline__ Fp8WorkTile(const SharedStorage<C>& s, const AttentionParams& p,
                                         int stage, const Thread<C>& t) {
    const WorkTile& item = s.items[stage];
    common = s.score_scale[stage];
    of_row[0] = of_row[1] = common;
    if (!kFastPath && p.q_scale.is_per_block()) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int32_t query = min(item.first_query + t.row(half), item.seq.q_len - 1);
        of_row[half] *= core::row_scale(p, p.q_element, p.q_scale, item.b, item.head, query);
      }
    }
    left_to_softmax = kFastPath && common > 0.f;
    unit = left_to_softmax ? common : 1.f;
  }

  /// Scores that have just come become probabilities.
  __device__ __forceinline__ void online_softmax(AccS<C>& acc_s, RowStats& states,
                                                 float (&rescale)[2], const Thread<C>& t,
                                                 const AttentionParams& p, const WorkTile& item,
                                                 std::int32_t tile, bool needs_mask) const {
    if (!kFastPath && p.k_scale.is_per_block()) scale_keys<C>(acc_s, p, item, tile);
    if (kFastPath && !left_to_softmax) {
#pragma unroll
      for (int i = 0; i < C::kTileK / 2; ++i) acc_s[i] *= common;
    }
    apply_mods_and_mask<C, kFastPath>(acc_s, t, p, item, tile, needs_mask,
                                      [&](int half) { return of_row[half]; });
    softmax<C, kFastPath>(acc_s, states, rescale, unit * static_cast<float>(core::kLog2E), p.fault);
  }
};

/// o = rescale o + of_values P V.
template <typename C, bool kScaled>
__device__ __forceinline__ void accumulate_pv(AccO<C>& acc_o,
                                              const std::uint32_t (&a)[C::kTileK / 32][4],
                                              SharedStorage<C>& s, int stage,
                                              const float (&rescale)[2], float of_values) {
  constexpr int kColumns = C::kHeadDim < C::kPartColumns ? C::kHeadDim : C::kPartColumns;
#pragma unroll
  for (int first = 0; first < C::kHeadDim; first += kColumns) {
    float part[kColumns / 2];
    wgmma_fence();
    issue_pv_slice<C, kColumns>(part, a, s, stage, first);
    wgmma_wait<0>();
    accumulate_pv_slice<C, kColumns, kScaled>(acc_o, part, first, rescale, of_values);
  }
}

/// A consumer warp of e4m3 tensors.
template <typename C, bool kFastPath>
struct Fp8Consumer : ConsumerWarp<C> {
  using Pipeline = typename C::Pipeline;
  using Position = typename ConsumerWarp<C>::Position;
  static constexpr bool kScoresAhead = C::kShape.scores_ahead();
  std::uint32_t a[C::kTileK / 32][4];
  TileQueueState place;  // of the item
  Fp8WorkTile<C, kFastPath> steps;

  __device__ __forceinline__ Fp8Consumer(SharedStorage<C>& s, const Params& params)
      : ConsumerWarp<C>(s, params, Thread<C>(threadIdx.x)) {}

  __device__ __forceinline__ void begin_item(TileQueueState item) {
    place = item;
    steps = Fp8WorkTile<C, kFastPath>(this->s, this->params.call, item.stage(), this->t);
    this->states = init_row_stats();
#pragma unroll
    for (int i = 0; i < C::kHeadDim / 2; ++i) this->acc_o[i] = 0.f;
  }

  __device__ __forceinline__ void softmax(const Position& at, bool needs_mask) {
    steps.online_softmax(this->acc_s, this->states, this->rescale, this->t, this->params.call,
                         this->item(place), at.tile, needs_mask);
  }
  __device__ __forceinline__ void pack_probabilities() { pack_code_operands<C>(a, this->acc_s); }

  /// o = rescale o + P V.
  __device__ __forceinline__ void add_pv(typename Pipeline::KvState values, std::int32_t tile) {
    const float of_values =
        kFastPath ? 1.f : scale_of_values<C>(this->params.call, this->item(place), tile);
    accumulate_pv<C, !kFastPath>(this->acc_o, a, this->s, values.stage(), this->rescale, of_values);
  }

  __device__ __forceinline__ void stash_row_stats() {
    sm90::stash_row_stats<C>(this->s, this->states, this->t, steps.unit);
  }
  __device__ __forceinline__ void write_item(TileQueueState item) {
    store_output<C>(this->acc_o, this->s, this->params.call, this->item(item), this->t,
                    this->s.output_factor[item.stage()]);
  }
};

}  // namespace flashcore::cuda::sm90
