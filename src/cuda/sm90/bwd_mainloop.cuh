// The mainloops of gradients: the GEMMs of a step and the consumer warps. core::consume_bwd_steps
// has the order of a step, bwd_score.cuh its arithmetic.
//
//   dkdv   64 keys a warpgroup:     Sᵀ = K Qᵀ, dPᵀ = V dOᵀ, dV += Pᵀ dO, dK += dZᵀ Q
//   dk                              Sᵀ,        dPᵀ,                      dK += dZᵀ Q
//   dv                              Sᵀ,                     dV += Pᵀ dO
//   dq     64 queries a warpgroup:  S = Q Kᵀ,  dP = dO Vᵀ,                dQ += dZ K
//
// P and dZ stay in registers: the accumulators of S and dP, packed to 16 bits, are A fragments.
#pragma once

#include "cuda/primitives/tma.cuh"
#include "cuda/sm90/bwd_epilogue.cuh"
#include "cuda/sm90/bwd_producer.cuh"
#include "cuda/sm90/bwd_score.cuh"

namespace flashcore::cuda::sm90 {

/// Issues S = A B^T: [64, step] = [64, kColumns] x [step, kColumns]^T, all operands K-major. The
/// warpgroup's 64 rows begin at s_a + group * 64 rows.
template <typename C, typename Steps, typename A, typename B, int kColumns>
__device__ __forceinline__ void issue_pairs(float (&acc)[Steps::kRows / 2],
                                            const unsigned char* s_a, const unsigned char* s_b,
                                            int group) {
  const std::uint64_t a = core::matrix_descriptor(
      shared_address(s_a) + group * (core::kQTileRows * core::kPanelRowBytes), 0);
  const std::uint64_t b = core::matrix_descriptor(shared_address(s_b), 0);
  using Gemm = Wgmma<Steps::kRows>;
  wgmma_fence();
  Gemm::template ss<typename C::Element, false>(acc, a, b);
#pragma unroll
  for (int step = 1; step < kColumns / 16; ++step) {
    Gemm::template ss<typename C::Element, true>(acc, core::advance(a, A::k_offset(step)),
                                                 core::advance(b, B::k_offset(step)));
  }
  wgmma_commit();
}

/// Issues acc += W B, or acc = W B: [64, columns] += [64, step] x [step, columns].
template <typename C, typename Steps, typename B, int kSums>
__device__ __forceinline__ void issue_sum(float (&acc)[kSums],
                                          const std::uint32_t (&frag)[Steps::kRows / 16][4],
                                          const unsigned char* s_b, bool accumulate) {
  const std::uint64_t b = core::matrix_descriptor(shared_address(s_b), B::kPanelBytes);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Steps::kRows / 16; ++step) {
    Wgmma<2 * kSums>::template rs_b_mn_major<typename C::Element>(
        acc, frag[step], core::advance(b, B::mn_offset(step)), accumulate || step > 0);
  }
  wgmma_commit();
}

/// Base of the consumer warps.
template <typename C, typename Steps_>
struct BwdConsumerWarp : BwdRoleLanes<C> {
  using Steps = Steps_;
  using State = typename Steps::State;
  using TileB1 = typename C::template TileB1<Steps>;
  using TileB2 = typename C::template TileB2<Steps>;
  static constexpr int kPairs = Steps::kRows / 2;  // of a thread
  static constexpr float kLog2E = static_cast<float>(core::kLog2E);
  const Thread<C> t;
  float acc_s[kPairs];   // S, then P
  float acc_dp[kPairs];  // dP, then dZ

  __device__ __forceinline__ BwdConsumerWarp(BwdStorage<C>& s, const BwdParams& params)
      : BwdRoleLanes<C>{{s, params}, static_cast<int>(threadIdx.x % 32)}, t(threadIdx.x) {}

  __device__ __forceinline__ int group() const { return t.group; }
  /// True if some row of A does not see all rows of the tile of B.
  __device__ __forceinline__ bool needs_mask(BwdQueueState queue, std::int32_t tile) const {
    return !this->work(queue).unmasked_tiles[t.group].contains(tile);
  }
  template <int kPending>
  __device__ __forceinline__ void wgmma_wait() const {
    cuda::wgmma_wait<kPending>();
  }
  __device__ __forceinline__ void issue_s(State b) {
    // Opaque: descriptors of A1 that the compiler keeps through the loop would spill.
    const int group = C::kHeadDim > 128 ? opaque(t.group) : t.group;
    issue_pairs<C, Steps, typename C::TileA1, TileB1, C::kHeadDim>(
        acc_s, this->s.a1(), this->s.template b1<Steps>(b.stage()), group);
  }
  __device__ __forceinline__ void issue_dp(State b) {
    issue_pairs<C, Steps, typename C::TileA2, TileB2, C::kVDim>(
        acc_dp, this->s.a2(), this->s.template b2<Steps>(Steps::b2(b).stage()), t.group);
  }

 protected:
  /// For P: in place, the GEMM of dP hides it. Otherwise ptxas computes it after dP, which is
  /// faster for some shapes (docs/experiments/sm90.md). Head dims above 192 have no registers for
  /// it.
  template <typename Code>
  __device__ __forceinline__ void run_in_place(Code code) const {
    constexpr int kDim = C::kHeadDim;
    constexpr bool kInPlace = Steps::kOfKeys ? kDim == 64 : kDim != 128 && kDim <= 192;
    if constexpr (kInPlace) {
      cuda::run_in_place(this->params.num_scheduled < 0, code);
    } else {
      code();
    }
  }
  /// with(score): the score of a call with options. alibi_slope: of the query's head.
  template <typename With>
  __device__ __forceinline__ void with_options(float alibi_slope, With with) const {
    const float slope = alibi_slope * kLog2E;
    if (this->params.softcap > 0.f) {
      with(OptionScore<true>{this->params.score_scale, this->params.softcap * kLog2E, slope});
    } else {
      with(OptionScore<false>{this->params.score_scale * kLog2E, 0.f, slope});
    }
  }
  /// Pairs that are not visible get the score -inf, so that P is 0.
  __device__ __forceinline__ void hide_scores(BwdQueueState queue, std::int32_t tile) {
    hide_pairs<Steps::kRows>(acc_s, visible_rows<C, Steps>(this->work(queue), t, tile),
                             core::negative_infinity<float>());
  }
  /// Their dZ is 0, whatever dP is.
  __device__ __forceinline__ void hide_dz(BwdQueueState queue, std::int32_t tile) {
    hide_pairs<Steps::kRows>(acc_dp, visible_rows<C, Steps>(this->work(queue), t, tile), 0.f);
  }
  /// Accumulators as A fragments of 16 columns: two n-tiles each.
  static __device__ __forceinline__ void pack_pairs(std::uint32_t (&frag)[Steps::kRows / 16][4],
                                                    const float (&acc)[kPairs]) {
#pragma unroll
    for (int i = 0; i < kPairs / 2; ++i) {
      frag[i / 4][i % 4] = pack<typename C::Element>(acc[2 * i], acc[2 * i + 1]);
    }
  }
  /// P and dZ of a pair of a call with options. A hidden pair has qk = -inf.
  __device__ __forceinline__ BwdPair with_score(const BwdScore& score, float qk, float dp,
                                                float base, float delta, float ds_scale) const {
    const bool hidden = qk == core::negative_infinity<float>();
    const float p = hidden ? 0.f : fast_exp2(score.value - base);
    const float slope = this->has_fault(InjectedFault::softcap_slope_ignored) ? 1.f : score.slope;
    return {p, score_gradient<C>(p, dp, delta, ds_scale) * slope};
  }
};

/// Consumer of tiles of keys: rows are keys, columns queries. Without dK there is no dP, without dV
/// P is not packed.
template <typename C, typename Steps>
struct KeysConsumer : BwdConsumerWarp<C, Steps> {
  using Base = BwdConsumerWarp<C, Steps>;
  using State = typename Steps::State;
  using Base::Base;
  float acc_dk[C::kHeadDim / 2], acc_dv[C::kVDim / 2];
  std::uint32_t p_frag[Steps::kRows / 16][4], dz_frag[Steps::kRows / 16][4];

  __device__ __forceinline__ void begin_tile(BwdQueueState) const {}

  /// P of a step. With options, score_gradients() computes it: registers are few.
  __device__ __forceinline__ void probabilities(BwdQueueState queue, State b, const BwdStep& step,
                                                bool needs_mask) {
    fence_registers(this->acc_s);
    if (needs_mask) this->hide_scores(queue, step.tile);
    if constexpr (C::kOptions) return;
    const float unit_log2 = this->params.call.fwd.softmax_scale_log2;
    this->run_in_place([&] {
      each_with(this->s.rows(b.stage()).base, [&](int i, float base) {
        this->acc_s[i] = fast_exp2(fmaf(this->acc_s[i], unit_log2, -base));
      });
    });
  }
  /// dZ of a step. Packs it and P.
  __device__ __forceinline__ void score_gradients(BwdQueueState queue, State b, const BwdStep& step,
                                                  bool needs_mask) {
    if constexpr (Steps::kHasDx) fence_registers(this->acc_dp);
    if constexpr (C::kOptions) {
      this->with_options(this->s.scalars[b.stage()].alibi_slope,
                         [&](const auto& score) { dz_with_options(queue, b, step, score); });
    }
    if constexpr (Steps::kHasDv) Base::pack_pairs(p_frag, this->acc_s);
    if constexpr (!Steps::kHasDx) return;
    if constexpr (!C::kOptions) {
      const float ds_scale = this->s.scalars[b.stage()].ds_scale;
      each_with(this->s.rows(b.stage()).delta, [&](int i, float delta) {
        this->acc_dp[i] = score_gradient<C>(this->acc_s[i], this->acc_dp[i], delta, ds_scale);
      });
    }
    if (needs_mask) this->hide_dz(queue, step.tile);
    Base::pack_pairs(dz_frag, this->acc_dp);
  }

  /// dV += Pᵀ dO.
  __device__ __forceinline__ void issue_dv(State b, bool accumulate) {
    issue_sum<C, Steps, typename Base::TileB2>(
        acc_dv, p_frag, this->s.template b2<Steps>(Steps::b2(b).stage()), accumulate);
  }
  /// dK += dZᵀ Q.
  __device__ __forceinline__ void issue_dx(State b, bool accumulate) {
    issue_sum<C, Steps, typename Base::TileB1>(acc_dk, dz_frag,
                                               this->s.template b1<Steps>(b.stage()), accumulate);
  }
  __device__ __forceinline__ void store_tile(BwdQueueState queue) {
    if constexpr (Steps::kHasDx) fence_registers(acc_dk);
    if constexpr (Steps::kHasDv) fence_registers(acc_dv);
    store_dkdv<C, Steps>(acc_dk, acc_dv, this->params.call, this->work(queue), this->t);
  }

 private:
  /// visit(i, x): x is the number of the pair's query in s_of_query.
  template <typename Visit>
  __device__ __forceinline__ void each_with(const float* s_of_query, Visit visit) const {
    const float* s_own = s_of_query + this->t.column(0, 0);
    float2 x{};
    for_pairs<Steps::kRows>([&](int i, int, int column) {
      if (i % 4 == 0) x = *reinterpret_cast<const float2*>(s_own + column);
      visit(i, i % 2 == 0 ? x.x : x.y);
    });
  }
  /// P and dZ from S and dP. Without dP, dZ is not used.
  template <typename Score>
  __device__ __forceinline__ void dz_with_options(BwdQueueState queue, State b, const BwdStep& step,
                                                  const Score& score) {
    const BwdRows<Steps::kRows>& s_rows = this->s.rows(b.stage());
    const BwdWorkTile& work = this->work(queue);
    const int first_column = this->t.column(0, 0);
    // The distance from the thread's first key to its first query of the step.
    const auto distance =
        static_cast<float>(step.tile * Steps::kRows + first_column + work.seq.mask.diagonal -
                           work.first_row - this->t.row(0));
    for_pairs<Steps::kRows>([&](int i, int half, int column) {
      const BwdPair pair = this->with_score(
          score(this->acc_s[i], distance + static_cast<float>(column - 8 * half)), this->acc_s[i],
          Steps::kHasDx ? this->acc_dp[i] : 0.f, s_rows.base[first_column + column],
          s_rows.delta[first_column + column], this->s.scalars[b.stage()].ds_scale);
      this->acc_s[i] = pair.p;
      this->acc_dp[i] = pair.dz;
    });
  }
};

/// Consumer of dq tiles: rows are queries, columns keys.
template <typename C, typename Steps>
struct DqConsumer : BwdConsumerWarp<C, Steps> {
  using Base = BwdConsumerWarp<C, Steps>;
  using State = typename Steps::State;
  using Base::Base;
  float acc_dq[C::kHeadDim / 2];
  std::uint32_t dz_frag[Steps::kRows / 16][4];
  float base[2], delta[2];  // of the thread's rows
  float ds_scale, slope;    // core::ds_unit(), of ALiBi

  __device__ __forceinline__ void begin_tile(BwdQueueState queue) {
    const core::BackwardParams& p = this->params.call;
    const BwdWorkTile& work = this->work(queue);
    ds_scale = C::kScalesDs ? core::ds_unit(p, work.b, work.first_head) : 1.f;
    slope = C::kOptions ? alibi_slope(p, work.b, work.head) : 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      base[half] = delta[half] = 0.f;
      const std::int32_t row = this->t.row(half), query = work.first_row + row;
      if (row >= work.rows) continue;
      const std::int64_t at = core::partial_row(p.fwd, work.b, work.head, work.seq.q_row, query);
      base[half] = log2_base(p, at);
      delta[half] = row_delta(p, at, query + 1 < work.seq.q_len) * ds_scale;
    }
  }

  /// P of a step. With options, score_gradients() computes it: registers are few.
  __device__ __forceinline__ void probabilities(BwdQueueState queue, State, const BwdStep& step,
                                                bool needs_mask) {
    fence_registers(this->acc_s);
    if (needs_mask) this->hide_scores(queue, step.tile);
    if constexpr (C::kOptions) return;
    const float unit_log2 = this->params.call.fwd.softmax_scale_log2;
    this->run_in_place([&] {
      for_pairs<Steps::kRows>([&](int i, int half, int) {
        this->acc_s[i] = fast_exp2(fmaf(this->acc_s[i], unit_log2, -base[half]));
      });
    });
  }
  /// dZ of a step, packed.
  __device__ __forceinline__ void score_gradients(BwdQueueState queue, State, const BwdStep& step,
                                                  bool needs_mask) {
    fence_registers(this->acc_dp);
    if constexpr (C::kOptions) {
      this->with_options(slope, [&](const auto& score) { dz_with_options(queue, step, score); });
    } else {
      for_pairs<Steps::kRows>([&](int i, int half, int) {
        this->acc_dp[i] = score_gradient<C>(this->acc_s[i], this->acc_dp[i], delta[half], ds_scale);
      });
    }
    if (needs_mask) this->hide_dz(queue, step.tile);
    Base::pack_pairs(dz_frag, this->acc_dp);
  }

  /// dQ += dZ K.
  __device__ __forceinline__ void issue_dx(State b, bool accumulate) {
    issue_sum<C, Steps, typename Base::TileB1>(acc_dq, dz_frag,
                                               this->s.template b1<Steps>(b.stage()), accumulate);
  }
  __device__ __forceinline__ void store_tile(BwdQueueState queue) {
    fence_registers(acc_dq);
    store_dq<C>(acc_dq, this->params.call, this->work(queue), this->t, ds_scale);
  }

 private:
  template <typename Score>
  __device__ __forceinline__ void dz_with_options(BwdQueueState queue, const BwdStep& step,
                                                  const Score& score) {
    const BwdWorkTile& work = this->work(queue);
    // The distance from the thread's first key of the step to its first query.
    const auto distance =
        static_cast<float>(work.first_row + this->t.row(0) + work.seq.mask.diagonal -
                           step.tile * Steps::kRows - this->t.column(0, 0));
    for_pairs<Steps::kRows>([&](int i, int half, int column) {
      const BwdPair pair =
          this->with_score(score(this->acc_s[i], distance + static_cast<float>(8 * half - column)),
                           this->acc_s[i], this->acc_dp[i], base[half], delta[half], ds_scale);
      this->acc_dp[i] = pair.dz;
    });
  }
};

}  // namespace flashcore::cuda::sm90
