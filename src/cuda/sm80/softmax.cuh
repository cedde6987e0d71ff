// The online softmax of a step, and O += P V.
#pragma once

#include "cuda/primitives/ptx.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm80/config.cuh"

namespace flashcore::cuda::sm80 {

inline constexpr float kLazyLog2 = 8.f;

/// The base-2 exponent of a score x whose row's maximum is `max`, in units of log2_unit. The plain
/// form is one instruction for each score. It rounds the product with the maximum first, so that a
/// maximum that stays gives exactly 0: a fused one would leave the rounding error, step after step
/// the same. Options bring scores near the largest number of f32, whose product with log2(e) would
/// overflow: their form subtracts first.
template <bool kPlain>
__device__ __forceinline__ float exponent(float x, float max, float log2_unit) {
  return kPlain ? fmaf(x, log2_unit, -__fmul_rn(max, log2_unit)) : (x - max) * log2_unit;
}

/// What exponentials of a row shrink by when its maximum grows.
template <bool kPlain>
__device__ __forceinline__ float rescale_of(float before, float max, float log2_unit) {
  return fast_exp2(kPlain ? __fsub_rn(__fmul_rn(before, log2_unit), __fmul_rn(max, log2_unit))
                          : (before - max) * log2_unit);
}

/// Turns scores into probabilities, updates the states and rescales the output.
template <typename C, bool kPlain, int kKeys>
__device__ __forceinline__ void softmax(Scores<C, kKeys>& score, Outputs<C>& o,
                                        RowStates<C>& s_states, float log2_unit,
                                        core::Plant plant) {
  RowStates<C> states = s_states;
  // A maximum that grows by less than 2^8 may wait: P then exceeds 1, which no format minds, and
  // the output need not be rescaled.
  const auto may_wait = [&](float max, const core::SoftmaxState<float>& state) {
    return (max - state.max) * log2_unit <= kLazyLog2;
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
        max[m][half] = max_passing_nan(max[m][half], score[m][n][C::reg_of(half, 0)]);
        max[m][half] = max_passing_nan(max[m][half], score[m][n][C::reg_of(half, 1)]);
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
        const float largest = row_lanes_max<C>(max[m][half]);
        const float before = state.max;
        if (!may_wait(largest, state)) state.max = largest;
        const float rescale =
            plant.is(PlantedBug::rescale_forgotten)
                ? 1.f
                : rescale_of<kPlain>(before, core::softmax_base(state.max), log2_unit);
        state.sum *= rescale;
#pragma unroll
        for (int n = 0; n < C::kColumnTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) o[m][n][C::reg_of(half, i)] *= rescale;
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
          float& x = score[m][n][C::reg_of(half, i)];
          x = fast_exp2(exponent<kPlain>(x, base, log2_unit));
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
                                                   const Scores<C, kKeys>& p, int step) {
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
__device__ __forceinline__ void multiply_values(Outputs<C>& o, const Scores<C, kKeys>& p,
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
      load_matrices_transposed(v, Tile::below(Tile::right(s_v, n / 2), 2 * step));
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        multiply_add<T>(o[m][n], a[m], v[0], v[1]);
        multiply_add<T>(o[m][n + 1], a[m], v[2], v[3]);
      }
    }
  }
}

}  // namespace flashcore::cuda::sm80
