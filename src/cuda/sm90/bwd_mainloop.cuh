// The mainloops of gradients: the GEMMs of a step and the consumer warps. core::consume_bwd_steps
// has the order of a step, bwd_score.cuh its arithmetic.
//
//   dkdv   64 keys a warpgroup:     Sᵀ = K Qᵀ, dPᵀ = V dOᵀ, dV += Pᵀ dO, dK += dZᵀ Q
//   dq     64 queries a warpgroup:  S = Q Kᵀ,  dP = dO Vᵀ,                dQ += dZ K
//
// P and dZ stay in registers: the accumulators of S and dP, packed to 16 bits, are A fragments.
#pragma once

#include "cuda/primitives/tma.cuh"
#include "cuda/sm90/bwd_epilogue.cuh"
#include "cuda/sm90/bwd_producer.cuh"
#include "cuda/sm90/bwd_score.cuh"

namespace flashcore::cuda::sm90 {

/// Issues S = A B^T: [64, step] = [64, head_dim] x [step, head_dim]^T, all operands K-major. The
/// warpgroup's 64 rows begin at s_a + group * 64 rows.
template <typename C, typename Steps>
__device__ __forceinline__ void issue_pairs(float (&acc)[Steps::kRows / 2],
                                            const unsigned char* s_a, const unsigned char* s_b,
                                            int group) {
  using A = typename C::TileA;
  using B = typename C::template TileB<Steps>;
  const std::uint64_t a = core::matrix_descriptor(
      shared_address(s_a) + group * (core::kQTileRows * core::kPanelRowBytes), 0);
  const std::uint64_t b = core::matrix_descriptor(shared_address(s_b), 0);
  using Gemm = Wgmma<Steps::kRows>;
  wgmma_fence();
  Gemm::template ss<typename C::Element, false>(acc, a, b);
#pragma unroll
  for (int step = 1; step < C::kHeadDim / 16; ++step) {
    Gemm::template ss<typename C::Element, true>(acc, core::advance(a, A::k_offset(step)),
                                                 core::advance(b, B::k_offset(step)));
  }
  wgmma_commit();
}

/// Issues acc += W B, or acc = W B: [64, head_dim] += [64, step] x [step, head_dim].
template <typename C, typename Steps>
__device__ __forceinline__ void issue_sum(float (&acc)[C::kHeadDim / 2],
                                          const std::uint32_t (&frag)[Steps::kRows / 16][4],
                                          const unsigned char* s_b, bool accumulate) {
  using B = typename C::template TileB<Steps>;
  const std::uint64_t b = core::matrix_descriptor(shared_address(s_b), B::kPanelBytes);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Steps::kRows / 16; ++step) {
    Wgmma<C::kHeadDim>::template rs_b_mn_major<typename C::Element>(
        acc, frag[step], core::advance(b, B::mn_offset(step)), accumulate || step > 0);
  }
  wgmma_commit();
}

/// Base of the consumer warps. kGeneral: the call has score modifications.
template <typename C, typename Steps_, bool kGeneral>
struct BwdConsumerWarp : BwdRoleLanes<C> {
  using Steps = Steps_;
  using State = typename Steps::State;
  static constexpr int kPairs = Steps::kRows / 2;  // of a thread
  static constexpr float kLog2E = static_cast<float>(core::kLog2E);
  const Thread<C> t;
  float acc_s[kPairs];   // S, then P, times the softcap's derivative once P is packed
  float acc_dp[kPairs];  // dP, then dZ
  float ds_scale;        // 2^t

  __device__ __forceinline__ BwdConsumerWarp(BwdStorage<C>& s, const BwdParams& params)
      : BwdRoleLanes<C>{{s, params}, static_cast<int>(threadIdx.x % 32)},
        t(threadIdx.x),
        ds_scale(1.f) {}

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
    issue_pairs<C, Steps>(acc_s, this->s.a1, this->s.template b1<Steps>(b.stage()), t.group);
  }
  __device__ __forceinline__ void issue_dp(State b) {
    issue_pairs<C, Steps>(acc_dp, this->s.a2, this->s.template b2<Steps>(b.stage()), t.group);
  }

 protected:
  /// with(score): the scores of the call. alibi_slope: of the query's head.
  template <typename With>
  __device__ __forceinline__ void with_scores(float alibi_slope, With with) const {
    if constexpr (kGeneral) {
      const float slope = alibi_slope * kLog2E;
      if (this->params.softcap > 0.f) {
        return with(
            OptionScore<true>{this->params.score_scale, this->params.softcap * kLog2E, slope});
      }
      return with(OptionScore<false>{this->params.score_scale * kLog2E, 0.f, slope});
    } else {
      with(PlainScore{this->params.call.fwd.softmax_scale_log2});
    }
  }
  /// visible(i, half, column) of a step.
  template <typename With>
  __device__ __forceinline__ void with_mask(BwdQueueState queue, std::int32_t tile,
                                            bool needs_mask, With with) const {
    if (needs_mask) {
      with(visible_rows<C, Steps>(this->work(queue), t, tile));
    } else {
      with([](int, int) { return true; });
    }
  }
};

/// Consumer of dkdv tiles: rows are keys, columns queries.
template <typename C, bool kGeneral>
struct DkDvConsumer : BwdConsumerWarp<C, typename C::DkDv, kGeneral> {
  using Base = BwdConsumerWarp<C, typename C::DkDv, kGeneral>;
  using Steps = typename C::DkDv;
  using State = typename Steps::State;
  using Base::Base;
  float acc_dk[C::kHeadDim / 2], acc_dv[C::kHeadDim / 2];
  std::uint32_t p_frag[Steps::kRows / 16][4], dz_frag[Steps::kRows / 16][4];

  __device__ __forceinline__ void begin_tile(BwdQueueState queue) {
    const BwdWorkTile& work = this->work(queue);
    if constexpr (C::kScalesDs) {
      this->ds_scale = scale_of_ds(this->params.call, work.b, work.head);
    }
  }

  /// P of a step, packed. Base and slope of column c are at s_rows.base[c] and s_rows.slope.
  __device__ __forceinline__ void probabilities(BwdQueueState queue, State b, const BwdStep& step,
                                                bool needs_mask) {
    fence_registers(this->acc_s);
    const BwdRows<Steps::kRows>& s_rows = this->s.rows[b.stage()];
    const BwdWorkTile& work = this->work(queue);
    const int first_column = this->t.column(0, 0);
    // Distance of the thread's first query of the step from its first key.
    const float distance =
        kGeneral ? static_cast<float>(step.tile * Steps::kRows + first_column +
                                      work.seq.mask.diagonal - work.first_row - this->t.row(0))
                 : 0.f;
    this->with_mask(queue, step.tile, needs_mask, [&](auto visible) {
      this->with_scores(kGeneral ? s_rows.slope : 0.f, [&](const auto& score) {
        probabilities_of(s_rows, first_column, distance, visible, score);
      });
    });
  }
  /// dZ of a step, packed.
  __device__ __forceinline__ void score_gradients(BwdQueueState queue, State b, const BwdStep& step,
                                                  bool needs_mask) {
    fence_registers(this->acc_dp);
    const float* s_delta = this->s.rows[b.stage()].delta + this->t.column(0, 0);
    this->with_mask(queue, step.tile, needs_mask, [&](auto visible) {
      float2 delta{};
      for_pairs<Steps::kRows>([&](int i, int half, int column) {
        if (i % 4 == 0) delta = *reinterpret_cast<const float2*>(s_delta + column);
        const float dz = score_gradient<C>(this->acc_s[i], this->acc_dp[i],
                                           i % 2 == 0 ? delta.x : delta.y, this->ds_scale);
        this->acc_dp[i] = visible(half, column) ? dz : 0.f;
      });
    });
    pack_pairs<C, Steps::kRows>(dz_frag, this->acc_dp);
  }

  /// dV += Pᵀ dO.
  __device__ __forceinline__ void issue_dv(State b, bool accumulate) {
    issue_sum<C, Steps>(acc_dv, p_frag, this->s.template b2<Steps>(b.stage()), accumulate);
  }
  /// dK += dZᵀ Q.
  __device__ __forceinline__ void issue_dx(State b, bool accumulate) {
    issue_sum<C, Steps>(acc_dk, dz_frag, this->s.template b1<Steps>(b.stage()), accumulate);
  }
  __device__ __forceinline__ void store_tile(BwdQueueState queue) {
    fence_registers(acc_dk);
    fence_registers(acc_dv);
    store_dkdv<C>(acc_dk, acc_dv, this->params.call, this->work(queue), this->t, this->ds_scale);
  }

 private:
  template <typename Visible, typename Score>
  __device__ __forceinline__ void probabilities_of(const BwdRows<Steps::kRows>& s_rows,
                                                   int first_column, float distance,
                                                   const Visible& visible, const Score& score) {
    const float* s_base = s_rows.base + first_column;
    float2 base{};
    float pair[2];
    for_pairs<Steps::kRows>([&](int i, int half, int column) {
      if (i % 4 == 0) base = *reinterpret_cast<const float2*>(s_base + column);
      const float own_base = i % 2 == 0 ? base.x : base.y;
      const BwdScore z = score(this->acc_s[i], distance + static_cast<float>(column - 8 * half));
      float p;
      if constexpr (kGeneral) {
        p = fast_exp2(z.value - own_base);
      } else {
        p = fast_exp2(score.minus(this->acc_s[i], 0.f, own_base));
      }
      p = visible(half, column) ? p : 0.f;
      pair[i % 2] = p;
      this->acc_s[i] = with_slope(p, z.slope, score);
      if (i % 2 == 1) {
        p_frag[i / 8][i / 2 % 4] = pack<typename C::Element>(pair[0], pair[1]);
      }
    });
  }
  template <typename Score>
  __device__ __forceinline__ float with_slope(float p, float slope, const Score&) const {
    if (!Score::kHasSlope || this->has_fault(InjectedFault::softcap_slope_ignored)) return p;
    return p * slope;
  }
};

/// Consumer of dq tiles: rows are queries, columns keys.
template <typename C, bool kGeneral>
struct DqConsumer : BwdConsumerWarp<C, typename C::Dq, kGeneral> {
  using Base = BwdConsumerWarp<C, typename C::Dq, kGeneral>;
  using Steps = typename C::Dq;
  using State = typename Steps::State;
  using Base::Base;
  float acc_dq[C::kHeadDim / 2];
  std::uint32_t dz_frag[Steps::kRows / 16][4];
  float base[2], delta[2], alibi_slope;  // of the thread's rows

  __device__ __forceinline__ void begin_tile(BwdQueueState queue) {
    const core::BackwardParams& p = this->params.call;
    const BwdWorkTile& work = this->work(queue);
    if constexpr (C::kScalesDs) this->ds_scale = scale_of_ds(p, work.b, work.first_head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      base[half] = delta[half] = 0.f;
      const std::int32_t row = this->t.row(half), query = work.first_row + row;
      if (row >= work.rows) continue;
      const std::int64_t at = core::partial_row(p.fwd, work.b, work.head, work.seq.q_row, query);
      base[half] = log2_base(p, at);
      delta[half] = row_delta(p, at, query + 1 < work.seq.q_len) * this->ds_scale;
    }
    if (kGeneral) {
      alibi_slope = p.fwd.alibi_slopes == nullptr
                        ? 0.f
                        : core::ScoreRow<float>{p.fwd, work.b, work.head, 0}.slope();
    }
  }

  __device__ __forceinline__ void probabilities(BwdQueueState queue, State, const BwdStep& step,
                                                bool needs_mask) {
    fence_registers(this->acc_s);
    const BwdWorkTile& work = this->work(queue);
    const float distance =
        kGeneral ? static_cast<float>(work.first_row + this->t.row(0) + work.seq.mask.diagonal -
                                      step.tile * Steps::kRows - this->t.column(0, 0))
                 : 0.f;
    this->with_mask(queue, step.tile, needs_mask, [&](auto visible) {
      this->with_scores(kGeneral ? alibi_slope : 0.f, [&](const auto& score) {
        using Score = std::decay_t<decltype(score)>;
        const bool has_slope =
            Score::kHasSlope && !this->has_fault(InjectedFault::softcap_slope_ignored);
        for_pairs<Steps::kRows>([&](int i, int half, int column) {
          float& x = this->acc_s[i];
          float p, slope = 1.f;
          if constexpr (kGeneral) {
            const BwdScore z = score(x, distance + static_cast<float>(8 * half - column));
            p = fast_exp2(z.value - base[half]);
            slope = z.slope;
          } else {
            p = fast_exp2(score.minus(x, 0.f, base[half]));
          }
          p = visible(half, column) ? p : 0.f;
          x = has_slope ? p * slope : p;
        });
      });
    });
  }
  __device__ __forceinline__ void score_gradients(BwdQueueState queue, State, const BwdStep& step,
                                                  bool needs_mask) {
    fence_registers(this->acc_dp);
    this->with_mask(queue, step.tile, needs_mask, [&](auto visible) {
      for_pairs<Steps::kRows>([&](int i, int half, int column) {
        const float dz =
            score_gradient<C>(this->acc_s[i], this->acc_dp[i], delta[half], this->ds_scale);
        this->acc_dp[i] = visible(half, column) ? dz : 0.f;
      });
    });
    pack_pairs<C, Steps::kRows>(dz_frag, this->acc_dp);
  }

  /// dQ += dZ K.
  __device__ __forceinline__ void issue_dx(State b, bool accumulate) {
    issue_sum<C, Steps>(acc_dq, dz_frag, this->s.template b1<Steps>(b.stage()), accumulate);
  }
  __device__ __forceinline__ void store_tile(BwdQueueState queue) {
    fence_registers(acc_dq);
    store_dq<C>(acc_dq, this->params.call, this->work(queue), this->t, this->ds_scale);
  }
};

}  // namespace flashcore::cuda::sm90
