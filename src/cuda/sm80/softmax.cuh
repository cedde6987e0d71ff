// The online softmax of a step, and O += P V.
#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/memory.cuh"
#include "cuda/primitives/mma.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm80/config.cuh"

namespace flashcore::cuda::sm80 {

inline constexpr float kRescaleThresholdLog2 = 8.f;

/// The base-2 exponent of a score x whose row's maximum is `max`, in units of unit_log2. The plain
/// form is one instruction for each score. It rounds the product with the maximum first, so that a
/// maximum that stays gives exactly 0: a fused one would leave the rounding error, step after step
/// the same. Options bring scores near the largest number of f32, whose product with log2(e) would
/// overflow: their form subtracts first.
template <bool kFastPath>
__device__ __forceinline__ float exponent(float x, float max, float unit_log2) {
  return kFastPath ? fmaf(x, unit_log2, -__fmul_rn(max, unit_log2)) : (x - max) * unit_log2;
}

/// What exponentials of a row shrink by when its maximum grows.
template <bool kFastPath>
__device__ __forceinline__ float rescale_of(float before, float max, float unit_log2) {
  return fast_exp2(kFastPath ? __fsub_rn(__fmul_rn(before, unit_log2), __fmul_rn(max, unit_log2))
                             : (before - max) * unit_log2);
}

/// Turns scores into probabilities, updates the states and rescales the output.
template <typename C, bool kFastPath, int kKeys>
__device__ __forceinline__ void softmax(AccS<C, kKeys>& acc_s, AccO<C>& acc_o,
                                        RowStats<C>& s_states, float unit_log2, core::Fault fault) {
  RowStats<C> states = s_states;
  // A maximum that grows by less than 2^8 may wait: P then exceeds 1, which no format minds, and
  // the output need not be rescaled.
  const auto may_wait = [&](float max, const core::SoftmaxState<float>& state) {
    return (max - state.max) * unit_log2 <= kRescaleThresholdLog2;
  };
  float max[C::kRowTiles][2];  // of the thread's own scores
  bool all_wait = true;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[m][half] = states.of[m][half].max;
#pragma unroll
      for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
        max[m][half] = max_ignore_nan(max[m][half], acc_s[m][n][C::reg_of(half, 0)]);
        max[m][half] = max_ignore_nan(max[m][half], acc_s[m][n][C::reg_of(half, 1)]);
      }
      all_wait = all_wait && may_wait(max[m][half], states.of[m][half]);
    }
  }
  // One branch for all rows, though each is decided by itself: most steps need not ask other lanes.
  if (!__all_sync(0xffffffffu, all_wait)) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        core::SoftmaxState<float>& state = states.of[m][half];
        const float largest = row_reduce_max<C>(max[m][half]);
        const float before = state.max;
        if (!may_wait(largest, state)) state.max = largest;
        const float rescale =
            fault.is(InjectedFault::rescale_forgotten)
                ? 1.f
                : rescale_of<kFastPath>(before, core::softmax_base(state.max), unit_log2);
        state.sum *= rescale;
#pragma unroll
        for (int n = 0; n < C::kColumnTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) acc_o[m][n][C::reg_of(half, i)] *= rescale;
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      core::SoftmaxState<float>& state = states.of[m][half];
      const float base = core::softmax_base(state.max);
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < kKeys / C::kTileWidth; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = acc_s[m][n][C::reg_of(half, i)];
          x = fast_exp2(exponent<kFastPath>(x, base, unit_log2));
          sum += x;
        }
      }
      state.sum += sum;
    }
  }
  s_states = states;
}

/// The probabilities of 16 keys as A operands. Two n-tiles of scores are one: the accumulator's
/// columns are its k.
template <typename C, int kKeys>
__device__ __forceinline__ void pack_probabilities(std::uint32_t (&a)[C::kRowTiles][4],
                                                   const AccS<C, kKeys>& p, int step) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int reg = 0; reg < 4; ++reg) {
      const float(&x)[4] = p[m][2 * step + reg / 2];
      a[m][reg] = pack<typename C::Operand>(x[2 * (reg % 2)], x[2 * (reg % 2) + 1]);
    }
  }
}

/// O += P V of the warp's rows and keys.
template <typename C, int kKeys>
__device__ __forceinline__ void gemm_pv(AccO<C>& acc_o, const AccS<C, kKeys>& p,
                                        const typename C::Element* s_values, int s_key,
                                        const Thread<C>& t) {
  using T = typename C::Element;
  using Tile = typename C::KeyTile;
  const core::Coordinate b = core::ldmatrix_b_trans(t.lane);
  const std::uint32_t s_v = shared_address(s_values) + Tile::offset(s_key + b.row, b.column);
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
    std::uint32_t a[C::kRowTiles][4];
    pack_probabilities<C, kKeys>(a, p, step);
#pragma unroll
    for (int n = 0; n < C::kColumnTiles; n += 2) {
      std::uint32_t v[4];
      ldmatrix_x4_trans(v, Tile::advance_rows8(Tile::advance_k(s_v, n / 2), 2 * step));
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        mma_m16n8k16<T>(acc_o[m][n], a[m], v[0], v[1]);
        mma_m16n8k16<T>(acc_o[m][n + 1], a[m], v[2], v[3]);
      }
    }
  }
}

}  // namespace flashcore::cuda::sm80
