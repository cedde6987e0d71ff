// Reductions over the lanes that share a row of scores: 16 neighbours (simt), the 4 of a quad or
// those at the same place of all 8 quads (tensor cores), or of the 4 octets (joins); and the base-2
// exponential.
#pragma once

#include "core/numeric.h"

namespace flashcore::cuda {

inline constexpr int kRowLanes = 16;

/// The larger one; a NaN is passed over (softmax_state.h). One instruction.
__device__ __forceinline__ float max_ignore_nan(float a, float b) { return fmaxf(a, b); }

/// The largest of a thread's own values, found in pairs: a chain would wait for each in turn.
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

/// Every lane gets the result. The order of additions is the same for every row.
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

/// Over the lanes with the same lane % 4.
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

/// Over the lanes with the same lane % 8: those at the same place of the four octets.
__device__ __forceinline__ float cross_octet_max(float x) {
  x = max_ignore_nan(x, __shfl_xor_sync(0xffffffffu, x, 8));
  return max_ignore_nan(x, __shfl_xor_sync(0xffffffffu, x, 16));
}

__device__ __forceinline__ float cross_octet_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 8);
  return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

/// Four sums over those lanes, of which octet i gets the one of x[i]: each hands on what it does
/// not keep.
__device__ __forceinline__ float octets_sum_each(const float (&x)[4]) {
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

/// core::output_factor() with the reciprocal of one instruction (relative error 2^-23); sums are no
/// smaller than 2^-8 where they are not 0.
__device__ __forceinline__ float fast_output_factor(float sum) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(sum));
  return sum == 0.f ? 0.f : y;
}

/// exp(x).
__device__ __forceinline__ float fast_exp(float x) {
  return fast_exp2(x * static_cast<float>(core::kLog2E));
}

/// core::capped_short() in few instructions.
__device__ __forceinline__ float capped_short(float argument, float cap) {
  return cap * (1.f - __fdividef(2.f, 1.f + fast_exp2(argument)));
}

}  // namespace flashcore::cuda
