// The consumer warps of a fused kernel: those of the split form's dkdv tiles, and dQ.
//
//   64 keys a warpgroup:     Sᵀ = K Qᵀ, dPᵀ = V dOᵀ, dV += Pᵀ dO, dK += dZᵀ Q
//   64 columns a warpgroup:  dQ = dZ K over the 128 keys of both, from dZᵀ in shared memory
#pragma once

#include "cuda/primitives/mma.cuh"
#include "cuda/sm90/bwd_inspector.cuh"
#include "cuda/sm90/bwd_mainloop.cuh"
#include "cuda/sm90/fused_config.cuh"

namespace flashcore::cuda::sm90 {

/// Issues dQ = dZ K: [64 queries, columns] = [64, 128 keys] x [128 keys, columns], both operands
/// MN-major: s_dz holds dZᵀ.
template <typename C, int kSums>
__device__ __forceinline__ void issue_dq_product(float (&acc)[kSums], const unsigned char* s_dz,
                                                 const unsigned char* s_k) {
  const std::uint64_t a = core::matrix_descriptor(shared_address(s_dz), C::TileDz::kPanelBytes);
  const std::uint64_t b = core::matrix_descriptor(shared_address(s_k), C::TileA1::kPanelBytes);
  using Gemm = Wgmma<2 * kSums>;
  wgmma_fence();
  Gemm::template ss_mn_major<typename C::Element, false>(acc, a, b);
#pragma unroll
  for (int step = 1; step < core::kBwdTileRows / 16; ++step) {
    Gemm::template ss_mn_major<typename C::Element, true>(
        acc, core::advance(a, C::TileDz::mn_offset(step)),
        core::advance(b, C::TileA1::mn_offset(step)));
  }
  wgmma_commit();
}

template <typename C>
struct FusedConsumer : KeysConsumer<C, core::FusedSteps> {
  using Steps = core::FusedSteps;
  using Base = KeysConsumer<C, Steps>;
  using State = Steps::State;
  using Base::Base;
  float acc_dq[C::kHeadDim / 4];

  /// Sums start at 0: a predicate for the first step would need a register.
  __device__ __forceinline__ void begin_tile(BwdQueueState) {
#pragma unroll
    for (int i = 0; i < C::kHeadDim / 2; ++i) this->acc_dk[i] = this->acc_dv[i] = 0.f;
  }
  /// The same state. The compiler then keeps the addresses of its stage in uniform registers.
  __device__ __forceinline__ State uniform(State b) const {
    return {static_cast<std::uint32_t>(warp_uniform(static_cast<std::int32_t>(b.count)))};
  }
  __device__ __forceinline__ core::BwdTileState tile_state(BwdQueueState queue) const {
    return this->s.tile_states[queue.stage()];
  }

  /// P of a step, also of hidden pairs.
  __device__ __forceinline__ void probabilities(BwdQueueState, State b, const BwdStep&, bool) {
    fence_registers(this->acc_s);
    const float unit_log2 = this->params.call.fwd.softmax_scale_log2;
    each_query(this->s.rows(b.stage()).base, [&](int i, float base) {
      this->acc_s[i] = fast_exp2(fmaf(this->acc_s[i], unit_log2, -base));
    });
  }
  /// dZ of a step. Packs it and P, and hides pairs then: f32 P and dZ that live until a branch
  /// would spill.
  __device__ __forceinline__ void score_gradients(BwdQueueState queue, State b, const BwdStep& step,
                                                  bool needs_mask) {
    fence_registers(this->acc_dp);
    Base::pack_pairs(this->p_frag, this->acc_s);
    const float ds_scale = this->s.scalars[b.stage()].ds_scale;
    each_query(this->s.rows(b.stage()).delta, [&](int i, float delta) {
      this->acc_dp[i] = score_gradient<C>(this->acc_s[i], this->acc_dp[i], delta, ds_scale);
    });
    Base::pack_pairs(this->dz_frag, this->acc_dp);
    if (!needs_mask) return;
    const BwdVisible visible = visible_rows<C, Steps>(this->work(queue), this->t, step.tile);
    for_pairs<Steps::kRows>([&](int i, int half, int column) {
      if (visible(half, column)) return;
      const std::uint32_t other = i % 2 == 0 ? 0xffff0000u : 0x0000ffffu;
      this->p_frag[i / 8][i / 2 % 4] &= other;
      this->dz_frag[i / 8][i / 2 % 4] &= other;
    });
  }

  /// Stores the warpgroup's rows of dZᵀ.
  __device__ __forceinline__ void stage_dz(State b) const {
    // The index among the consumers. Opaque: an address kept through the loop would spill.
    const int thread = (opaque(threadIdx.x) + 128) % 256u;
    const int key = thread / 32 * 16 + thread % 16, query = thread / 16 % 2 * 8;
    // The swizzle permutes chunks of 16 bytes, so 32 bytes further is one bit.
    const std::uint32_t s_own =
        shared_address(this->s.dz[b.stage()]) + C::TileDz::offset(key, query);
#pragma unroll
    for (int i = 0; i < Steps::kRows / 16; ++i) stmatrix_x4(s_own ^ (32 * i), this->dz_frag[i]);
    fence_async_proxy();
  }
  // Opaque: addresses that the compiler keeps through the loop would spill.
  __device__ __forceinline__ void issue_dp(State b) {
    using TileB = typename Base::TileB2;
    issue_pairs<C, Steps, typename C::TileA2, TileB, C::kVDim>(
        this->acc_dp, this->s.a2(), this->s.template b2<Steps>(b.stage()),
        warp_uniform(opaque(this->t.group)));
  }
  __device__ __forceinline__ void issue_dq(State b) {
    using Tile = typename C::TileA1;
    static_assert(C::kHeadDim == 2 * Tile::kPanelColumns);
    issue_dq_product<C>(acc_dq, this->s.dz[b.stage()],
                        this->s.a1() + warp_uniform(opaque(this->t.group)) * Tile::kPanelBytes);
  }
  /// Stores the accumulators of dQ for the store thread.
  __device__ __forceinline__ void stage_dq(State b) {
    fence_registers(acc_dq);
    constexpr int kVectors = C::kHeadDim / 16;
    float4* const s_own = reinterpret_cast<float4*>(this->s.dq[b.stage()]) +
                          this->t.group * 128 * kVectors + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      s_own[128 * i] =
          make_float4(acc_dq[4 * i], acc_dq[4 * i + 1], acc_dq[4 * i + 2], acc_dq[4 * i + 3]);
    }
    fence_async_proxy();
  }

  /// Puts 0 in place of keys past the last one where other memory follows: their dZ is 0, but
  /// 0 * NaN is NaN. Marks the head if K or V of the others is not finite, for simt/repair.cu.
  __device__ __forceinline__ void inspect_keys(BwdQueueState queue) const {
    using Tile = typename C::TileA1;
    constexpr int kThreads = 128 * core::kBwdConsumers;
    const BwdWorkTile& work = this->work(queue);
    std::uint32_t bad = 0;
#pragma unroll 1
    for (int i = 16 * (static_cast<int>(threadIdx.x) - 128); i < 2 * Tile::kBytes;
         i += 16 * kThreads) {
      uint4& s_vec = *reinterpret_cast<uint4*>(this->s.a1() + i);  // V follows K
      if (i % Tile::kPanelBytes / core::kPanelRowBytes >= work.rows) {
        if (this->params.k_tail_dirty) s_vec = {};
        continue;
      }
      const uint4 x = s_vec;
      for (const std::uint32_t two : {x.x, x.y, x.z, x.w}) {
        add_nonfinite<typename C::Element>(bad, two);
      }
    }
    if ((bad & kNonfiniteSigns) != 0) {
      const core::BackwardParams& p = this->params.call;
      p.nonfinite_heads[work.b * p.fwd.kv_heads + work.head] = 1;
    }
    fence_async_proxy();
  }

 private:
  /// visit(i, x): x is the number of the pair's query in s_of_query. Opaque: see issue_s().
  template <typename Visit>
  static __device__ __forceinline__ void each_query(const float* s_of_query, Visit visit) {
    const float* s_own = s_of_query + opaque(threadIdx.x) % 4u * 2;
    float2 x{};
    for_pairs<Steps::kRows>([&](int i, int, int column) {
      if (i % 4 == 0) x = *reinterpret_cast<const float2*>(s_own + column);
      visit(i, i % 2 == 0 ? x.x : x.y);
    });
  }
};

}  // namespace flashcore::cuda::sm90
