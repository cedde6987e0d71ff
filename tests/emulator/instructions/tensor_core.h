// The sums of tensor cores. Products are exact. A step adds several of them to the accumulator at
// once: it aligns all to the largest exponent, cuts what lies behind the last bit that it keeps,
// and cuts the sum to the format of the result. Every cut is towards zero.
//
// The widths are those found by experiments on GPUs: Fasi et al., "Numerical behavior of NVIDIA
// tensor cores" (PeerJ Computer Science 7:e330); Xie et al., "MMA-Sim" (arXiv:2511.10909); Khattak
// and Mikaitis, "Accurate models of NVIDIA tensor cores" (arXiv:2512.07004).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace flashcore::emulator {

enum class TensorFormat : std::uint32_t { f16, bf16, e4m3, e5m2 };

/// The exponent of a format's subnormals.
constexpr int least_exponent(TensorFormat format) {
  switch (format) {
    case TensorFormat::bf16: return -126;
    case TensorFormat::e4m3: return -6;
    default: return -14;
  }
}

struct TensorCore {
  int step;         ///< products that are added at once
  int kept_bits;    ///< below the largest exponent of a step
  int result_bits;  ///< of the mantissa of the sum
  int least_a, least_b;
};

constexpr TensorCore tensor_core(int compute_capability, TensorFormat a, TensorFormat b) {
  const int least_a = least_exponent(a), least_b = least_exponent(b);
  if (b == TensorFormat::e4m3 || b == TensorFormat::e5m2) return {32, 13, 13, least_a, least_b};
  return compute_capability >= 90 ? TensorCore{16, 25, 23, least_a, least_b}
                                  : TensorCore{8, 24, 23, least_a, least_b};
}

/// The exponent that a value is aligned by; that of zero is below all others.
inline std::int32_t alignment_of(float x, int least) {
  const auto bits = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(x) & 0x7fffffffu);
  return bits == 0 ? -2048 : std::max((bits >> 23) - 127, least);
}

/// c += a b for 16 rows, with `depth` products per element: c[row][column], a[k][row],
/// b[k][column].
template <int kColumns>
void add_products(const TensorCore& core, int depth, int columns, const float (*a)[16],
                  const float (*b)[kColumns], float (*c)[kColumns]) {
  // The bits of a double that the result drops.
  const std::uint64_t dropped = (std::uint64_t{1} << (52 - core.result_bits)) - 1;
  for (int first = 0; first < depth; first += core.step) {
    const int last = std::min(depth, first + core.step);
    for (int row = 0; row < 16; ++row) {
      std::int32_t top[kColumns] = {};
      double scale[kColumns] = {}, sum[kColumns] = {};
      for (int n = 0; n < columns; ++n) top[n] = alignment_of(c[row][n], -126);
      for (int k = first; k < last; ++k) {
        const std::int32_t exponent = alignment_of(a[k][row], core.least_a);
        for (int n = 0; n < columns; ++n)
          top[n] = std::max(top[n], exponent + alignment_of(b[k][n], core.least_b));
      }
      for (int n = 0; n < columns; ++n) {
        top[n] = std::max(top[n], -400);  // a step of zeros
        scale[n] = std::bit_cast<double>(std::int64_t{1023 + core.kept_bits - top[n]} << 52);
        sum[n] = std::trunc(static_cast<double>(c[row][n]) * scale[n]);
      }
      for (int k = first; k < last; ++k) {
        const double x = a[k][row];
        for (int n = 0; n < columns; ++n)
          sum[n] += std::trunc(x * static_cast<double>(b[k][n]) * scale[n]);
      }
      for (int n = 0; n < columns; ++n) {
        const double exact = sum[n] / scale[n];
        c[row][n] = static_cast<float>(
            std::bit_cast<double>(std::bit_cast<std::uint64_t>(exact) & ~dropped));
      }
    }
  }
}

}  // namespace flashcore::emulator
