// Reductions over the lanes that share a row of scores: half a warp (simt), a quad, the same lane
// of all 8 quads (sm80) or of all 4 octets (combine). Also fast exponentials and reciprocals.
#pragma once

#include "core/numeric.h"
#include "core/softcap.h"

namespace flashcore::cuda {

inline constexpr int kRowLanes = 16;

/// Maximum that ignores NaN (core/softmax.h). One instruction.
__device__ __forceinline__ float max_ignore_nan(float a, float b) { return fmaxf(a, b); }

/// Maximum of a thread's own values. A tree, because a chain has a longer latency.
template <int kCount>
__device__ __forceinline__ float largest(const float (&x)[kCount]) {
  float left[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) left[i] = x[i];
#pragma unroll
  for (int count = kCount; count > 1; count = (count + 1) / 2) {
#pragma unroll
    for (int i = 0; i < count / 2; ++i) left[i] = max_ignore_nan(left[i], left[count - 1 - i]);
  }
  return left[0];
}

/// Reduces over half a warp. Every lane gets the result, and every row adds in the same order.
__device__ __forceinline__ float half_warp_max(float x) {
#pragma unroll
  for (int offset = kRowLanes / 2; offset > 0; offset /= 2) {
    x = max_ignore_nan(x, __shfl_xor_sync(0xffffffffu, x, offset, kRowLanes));
  }
  return x;
}

__device__ __forceinline__ float half_warp_sum(float x) {
#pragma unroll
  for (int offset = kRowLanes / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, offset, kRowLanes);
  }
  return x;
}

__device__ __forceinline__ float quad_max(float x) {
  x = max_ignore_nan(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return max_ignore_nan(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/// Reduces over the lanes with the same lane % 4.
__device__ __forceinline__ float cross_quad_max(float x) {
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) {
    x = max_ignore_nan(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

__device__ __forceinline__ float cross_quad_sum(float x) {
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

/// Reduces over the lanes with the same lane % 8.
__device__ __forceinline__ float cross_octet_max(float x) {
  x = max_ignore_nan(x, __shfl_xor_sync(0xffffffffu, x, 8));
  return max_ignore_nan(x, __shfl_xor_sync(0xffffffffu, x, 16));
}

__device__ __forceinline__ float cross_octet_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 8);
  return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

/// Four sums over the lanes with the same lane % 8; octet i gets the sum of x[i].
__device__ __forceinline__ float cross_octet_sum_each(const float (&x)[4]) {
  const bool high = threadIdx.x & 16, odd = threadIdx.x & 8;
  const float even = (high ? x[2] : x[0]) + __shfl_xor_sync(0xffffffffu, high ? x[0] : x[2], 16);
  const float next = (high ? x[3] : x[1]) + __shfl_xor_sync(0xffffffffu, high ? x[1] : x[3], 16);
  return (odd ? next : even) + __shfl_xor_sync(0xffffffffu, odd ? even : next, 8);
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = max_ignore_nan(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

/// 2^x in one instruction: relative error 2^-22, 0 for -inf, NaN for NaN, subnormals flushed.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// core::output_factor() with a one-instruction reciprocal (relative error 2^-23). A sum is 0 or at
/// least 2^-8.
__device__ __forceinline__ float fast_output_factor(float sum) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(sum));
  return sum == 0.f ? 0.f : y;
}

__device__ __forceinline__ float fast_exp(float x) {
  return fast_exp2(x * static_cast<float>(core::kLog2E));
}

/// core::capped_short() with approximate instructions.
__device__ __forceinline__ float capped_short(float argument, float cap) {
  return cap * (1.f - __fdividef(2.f, 1.f + fast_exp2(argument)));
}

/// Math policy of core/softmax.h and core/score.h: approximate instructions.
struct FastMath {
  __device__ __forceinline__ static float exp(float x) { return fast_exp(x); }
  __device__ __forceinline__ static float output_factor(float sum) {
    return fast_output_factor(sum);
  }
  /// each(change) replaces every score by change(score).
  template <typename Each>
  __device__ __forceinline__ static void softcap(float cap, Each each) {
    each([&](float argument) { return capped_short(argument, cap); });
  }
  __device__ __forceinline__ static float absolute(float x) { return fabsf(x); }
};

}  // namespace flashcore::cuda
