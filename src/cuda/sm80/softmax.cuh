// The online softmax of a step, and O += P V.
#pragma once

#include "cuda/primitives/ptx.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm80/config.cuh"

namespace flashcore::cuda::sm80 {

inline constexpr float kLazyLog2 = 8.f;

/// Turns scores into probabilities, updates the states and rescales the output. Scores count
/// `factor` times; a state's maximum is kept without the factor.
template <typename C, int kKeys>
__device__ __forceinline__ void softmax(Scores<C, kKeys>& score, Outputs<C>& o,
                                        RowStates<C>& s_states, float factor, core::Plant plant) {
  RowStates<C> states = s_states;
  float base[C::kRowTiles][2], rescale[C::kRowTiles][2];
  bool rescales = false;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      core::SoftmaxState<float>& state = states.of[m][half];
      float max = state.max;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        max = max_passing_nan(max, score[m][n][2 * half]);
        max = max_passing_nan(max, score[m][n][2 * half + 1]);
      }
      max = quad_max(max);
      // A maximum that grows by less than 2^8 may wait: P then exceeds 1, which no format minds,
      // and the output need not be rescaled. Decided for each row by itself.
      if ((max - state.max) * factor <= kLazyLog2) max = state.max;
      // Products are rounded before they are subtracted, so that a maximum that stays gives exactly
      // 1: a fused one would leave the rounding error, step after step the same.
      base[m][half] = __fmul_rn(core::softmax_base(max), factor);
      rescale[m][half] = fast_exp2(__fsub_rn(__fmul_rn(state.max, factor), base[m][half]));
      if (plant.is(PlantedBug::rescale_forgotten)) rescale[m][half] = 1.f;
      rescales = rescales || rescale[m][half] != 1.f;
      state.max = max;
    }
  }
  // One branch for all rows, and only around multiplications by exactly 1: what follows it, the
  // exponentials and the products with V, can then overlap.
  if (__any_sync(0xffffffffu, rescales)) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < C::kColumnTiles; ++n) {
#pragma unroll
        for (int reg = 0; reg < 4; ++reg) o[m][n][reg] *= rescale[m][reg / 2];
      }
    }
  }
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int reg = 2 * half; reg < 2 * half + 2; ++reg) {
          score[m][n][reg] = fast_exp2(fmaf(score[m][n][reg], factor, -base[m][half]));
          sum += score[m][n][reg];
        }
      }
      core::SoftmaxState<float>& state = states.of[m][half];
      state.sum = core::add_tile_sum(state.sum, rescale[m][half], sum);
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
