// Assertions inside kernels, for code compiled with FLASHCORE_ASSERTS; FLASHCORE_ASSERT=1 in the
// environment switches them on. A kernel passes the values it is about to store. An impossible
// value ends the program with the kernel's name and the row: abort() on a CPU, a trap after a
// printf on a GPU. In all other code these functions are empty.
//
// NaN among the inputs is legal and reaches the output. A NaN in the output therefore makes the
// assertion read all inputs of the row again. That is slow, and happens only on a NaN.
#pragma once

#include "core/combine.h"
#include "core/element.h"
#include "core/quant_formats.h"
#include "core/row_offset.h"
#include "core/seq_info.h"
#include "core/softmax.h"

#if defined(FLASHCORE_ASSERTS)

// Not inlined, so that it costs kernels no registers, and static, so that no copy of it compiled
// for one instruction set can serve another.
#if defined(__CUDACC__)
#define FLASHCORE_COLD static __host__ __device__ __noinline__
#else
#define FLASHCORE_COLD [[maybe_unused]] static __attribute__((noinline, cold))
#endif

namespace flashcore::core {

/// True if FLASHCORE_ASSERT=1. AttentionParams::kernel is empty otherwise. (src/cpu/assert.cc)
bool assertions_enabled() noexcept;

/// Writes the message to standard error and aborts. (src/cpu/assert.cc)
[[noreturn]] void assertion_failed(const char* kernel, std::int32_t b, std::int32_t h,
                                   std::int64_t row, const char* what) noexcept;

}  // namespace flashcore::core

#if defined(__CUDA_ARCH__)
#define FLASHCORE_KERNEL_FAIL(kernel, b, h, row, what)                                            \
  (printf("flashcore: kernel %s, batch %d, head %d, row %lld: %s\n", kernel, static_cast<int>(b), \
          static_cast<int>(h), static_cast<long long>(row), what),                                \
   __trap())
#else
#define FLASHCORE_KERNEL_FAIL(kernel, b, h, row, what) \
  ::flashcore::core::assertion_failed(kernel, b, h, row, what)
#endif

/// `what` describes the value, e.g. "the sum is negative".
#define FLASHCORE_KERNEL_ASSERT(condition, kernel, b, h, row, what)   \
  do {                                                                \
    if (!(condition)) FLASHCORE_KERNEL_FAIL(kernel, b, h, row, what); \
  } while (false)

namespace flashcore::core {

/// The largest |x| of a row of `columns` elements; infinity if one is not finite.
template <typename T>
FLASHCORE_COLD T largest_of(const void* base, Element element, std::int64_t offset,
                            std::int64_t stride, std::int32_t columns) {
  T largest = 0;
  for (std::int32_t c = 0; c < columns; ++c) {
    const std::int64_t at = offset + c * stride;
    const T x = is_8bit(element)
                    ? static_cast<T>(decode(element, static_cast<const std::uint8_t*>(base)[at]) *
                                     format_step(element))
                    : load_element<T>(base, element, at);
    if (!(x - x == T(0))) return -negative_infinity<T>();  // NaN or infinity
    const T magnitude = x < T(0) ? -x : x;
    if (magnitude > largest) largest = magnitude;
  }
  return largest;
}

template <typename T>
FLASHCORE_COLD T magnitude_of(float scale) {
  return static_cast<T>(scale < 0.f ? -scale : scale);
}

/// True if all inputs of row i of (batch b, head h) are finite and so small that no product or sum
/// of them overflows f32: a NaN in the result is then an error. Bias and sinks may be -inf.
template <typename T>
FLASHCORE_COLD bool row_inputs_are_finite(const AttentionParams& p, const SeqInfo& seq,
                                          std::int32_t b, std::int32_t h, std::int32_t i) {
  constexpr T kMost = T(1e37);
  const std::int32_t kv_head = kv_head_of(p, h);
  const std::int64_t q_row = static_cast<std::int64_t>(seq.q_row) + i;
  const T q = largest_of<T>(p.q, p.q_element, row_offset(p.q_strides, b, h, q_row),
                            p.q_strides.column, p.head_dim) *
              magnitude_of<T>(p.q_scale.at(b, h, i));
  const double score_scale = p.score_scale < 0 ? -p.score_scale : p.score_scale;
  const T products =
      q * static_cast<T>(p.head_dim) * static_cast<T>(score_scale < 1 ? 1 : score_scale);
  const KvRowMap rows = kv_row_map(p, seq, b);
  for (std::int32_t j = 0; j < seq.kv_len; ++j) {
    const auto offset = [&](const Strides& strides) {
      return row_offset(strides, rows.at(j), kv_head);
    };
    const T k =
        largest_of<T>(p.k, p.k_element, offset(p.k_strides), p.k_strides.column, p.head_dim) *
        magnitude_of<T>(p.k_scale.at(b, kv_head, j));
    const T v = largest_of<T>(p.v, p.v_element, offset(p.v_strides), p.v_strides.column, p.v_dim) *
                magnitude_of<T>(p.v_scale.at(b, kv_head, j));
    // Weights can grow to 2^8 before a kernel rescales them.
    if (!(products * k < kMost && v * T(256) * static_cast<T>(seq.kv_len) < kMost)) {
      return false;
    }
    if (p.bias != nullptr) {
      const T bias = load_element<T>(
          p.bias, p.bias_element, row_offset(p.bias_strides, b, h, i) + j * p.bias_strides.column);
      if (!(bias < T(3e38))) return false;
    }
  }
  if (p.alibi_slopes != nullptr) {
    const float slope = p.alibi_slopes[b * p.alibi_batch_stride + h * p.alibi_head_stride];
    if (!(slope > -1e27f && slope < 1e27f)) return false;  // times a distance below 2^32
  }
  return p.sinks == nullptr || p.sinks[h * p.sinks_stride] < -negative_infinity<float>();
}

/// Checks the final state and the LSE of a row.
template <typename T>
FLASHCORE_HD void assert_row_state(const AttentionParams& p, const SeqInfo& seq, std::int32_t b,
                                   std::int32_t h, std::int32_t i, const SoftmaxState<T>& state,
                                   T lse) {
  if (p.kernel[0] == '\0') return;
  FLASHCORE_KERNEL_ASSERT(state.max == state.max, p.kernel, b, h, i,
                          "the maximum is NaN, which it never may be");
  FLASHCORE_KERNEL_ASSERT(!(state.sum < T(0)), p.kernel, b, h, i, "the sum is negative");
  FLASHCORE_KERNEL_ASSERT(state.sum == state.sum || !row_inputs_are_finite<T>(p, seq, b, h, i),
                          p.kernel, b, h, i, "the sum is NaN though every input is finite");
  FLASHCORE_KERNEL_ASSERT(lse == lse || !row_inputs_are_finite<T>(p, seq, b, h, i), p.kernel, b, h,
                          i, "the LSE is NaN though every input is finite");
}

/// Checks one element of the row's output.
template <typename T>
FLASHCORE_HD void assert_output(const AttentionParams& p, const SeqInfo& seq, std::int32_t b,
                                std::int32_t h, std::int32_t i, T out) {
  if (p.kernel[0] == '\0') return;
  FLASHCORE_KERNEL_ASSERT(out == out || !row_inputs_are_finite<T>(p, seq, b, h, i), p.kernel, b, h,
                          i, "the output is NaN though every input is finite");
}

/// Checks the state that combines partial results. The kernel that stored the partial LSEs has
/// already checked them for NaN and infinity. On a GPU this assertion is always on.
template <typename T, typename Params>
FLASHCORE_HD void assert_combined(const Params& p, const SoftmaxState<T>& state, std::int64_t b,
                                  std::int64_t h, std::int64_t row) {
#if !defined(__CUDA_ARCH__)
  if (!assertions_enabled()) return;
#endif
  FLASHCORE_KERNEL_ASSERT(!(state.sum < T(0)), "combine", static_cast<std::int32_t>(b),
                          static_cast<std::int32_t>(h), row, "the sum is negative");
  if (state.sum == state.sum) return;
  bool explained =
      p.sinks != nullptr && !(p.sinks[h * p.sinks_stride] < -negative_infinity<float>());
  for (std::int32_t part = 0; part < p.parts; ++part) {
    if (!(partial_lse<T>(p, part, b, h, row) < -negative_infinity<T>())) explained = true;
  }
  FLASHCORE_KERNEL_ASSERT(explained, "combine", static_cast<std::int32_t>(b),
                          static_cast<std::int32_t>(h), row,
                          "the sum is NaN though no partial LSE is");
}

}  // namespace flashcore::core

#else

#define FLASHCORE_KERNEL_ASSERT(condition, kernel, b, h, row, what) static_cast<void>(0)

namespace flashcore::core {

template <typename T>
FLASHCORE_HD void assert_row_state(const AttentionParams&, const SeqInfo&, std::int32_t,
                                   std::int32_t, std::int32_t, const SoftmaxState<T>&, T) {}
template <typename T>
FLASHCORE_HD void assert_output(const AttentionParams&, const SeqInfo&, std::int32_t, std::int32_t,
                                std::int32_t, T) {}
template <typename T>
FLASHCORE_HD void assert_combined(const CombineParams&, const SoftmaxState<T>&, std::int64_t,
                                  std::int64_t, std::int64_t) {}

}  // namespace flashcore::core

#endif
