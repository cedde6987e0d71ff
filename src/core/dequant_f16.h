// Dequantizes 8-bit K/V to f16 MMA operands in registers: the four bytes of a register become two
// registers of two f16 each, without a table or shuffles. The conversion is exact for every value
// of every format, including NaN and infinities.
//
// The pairs are bytes 0 and 2, and bytes 1 and 3, so that no byte changes its half of the register.
// Sixteen elements come out in the order of even_odd_index() (mma_layout.h). The other operand of
// the GEMM follows that order; for columns of the result, the epilogue undoes it.
#pragma once

#include "core/quant_formats.h"

namespace flashcore::core {

struct F16x2Pair {
  std::uint32_t even;  // bytes 0 (lower half) and 2
  std::uint32_t odd;   // bytes 1 and 3
};

// From sm_89 on, one instruction converts two e4m3 to f16. Other GPUs and the host shift bits.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
inline constexpr bool kConvertsE4m3 = true;
#else
inline constexpr bool kConvertsE4m3 = false;
#endif

/// Factor from the values of Dequantizer to those of decode(). Bits of e4m3 shifted into an f16
/// keep their exponent, which f16 reads with another bias.
FLASHCORE_HD constexpr float code_unit(Element element, bool converts = kConvertsE4m3) {
  return element == Element::e4m3 && !converts ? 256.f : 1.f;
}

/// Four encoded zeros.
FLASHCORE_HD constexpr std::uint32_t zero_codes(Element element) {
  return element == Element::u8 ? 0x80808080u : 0u;
}

/// The largest power of two not above a positive value, clamped so that it and its reciprocal are
/// normal numbers. Other values give the nearest of these powers.
FLASHCORE_HD float power_of_two_near(float value) {
  constexpr std::uint32_t kSmallest = 0x00800000u, kLargest = 0x7e800000u;  // 2^-126, 2^126
  const std::uint32_t power = bits_of_float(value) & 0x7f800000u;
  return float_of_bits(power < kSmallest ? kSmallest : power > kLargest ? kLargest : power);
}

namespace detail {

FLASHCORE_HD constexpr std::uint32_t both_halves(std::uint32_t x) { return x << 16 | x; }

#if !defined(__CUDA_ARCH__)
inline std::uint32_t one_fma(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const auto wide = [](std::uint32_t x) -> double {
    return float_of_f16(static_cast<std::uint16_t>(x & 0xffffu));
  };
  return f16_of_float(static_cast<float>(wide(a) * wide(b) + wide(c)));
}
#endif

/// a · b + c of both halves, rounded once, with subnormals.
FLASHCORE_HD std::uint32_t fma_halves(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
#if defined(__CUDA_ARCH__)
  std::uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  return one_fma(a >> 16, b >> 16, c >> 16) << 16 | one_fma(a, b, c);
#endif
}

}  // namespace detail

/// Converts four bytes of one format to f16. int8 includes u8, which differs in `flip`.
template <Element kElement>
struct Dequantizer {
  static_assert(kElement == Element::e4m3 || kElement == Element::e5m2 ||
                kElement == Element::int8);
  std::uint32_t flip;  // XOR that gives integers a zero point of 128

  FLASHCORE_HD explicit Dequantizer(Element element)
      : flip(element == Element::u8 ? 0u : 0x80808080u) {}

  FLASHCORE_HD F16x2Pair operator()(std::uint32_t bytes) const {
    if constexpr (kElement == Element::e4m3 && kConvertsE4m3) {
      return converted(bytes);
    } else if constexpr (kElement == Element::int8) {
      bytes ^= flip;
      return {integers(bytes), integers(bytes >> 8)};
    } else {
      return {floats(bytes << 8), floats(bytes)};
    }
  }

 private:
  FLASHCORE_HD static F16x2Pair converted(std::uint32_t bytes) {
    F16x2Pair pairs{};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 even, odd;\n"
        "mov.b32 {even, odd}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, even;\n"
        "cvt.rn.f16x2.e4m3x2 %1, odd;\n}\n"
        : "=r"(pairs.even), "=r"(pairs.odd)
        : "r"(__byte_perm(bytes, 0, 0x3120)));
#else
    static_cast<void>(bytes);
#endif
    return pairs;
  }

  /// Integers in the lower bytes of both halves: (1024 + byte) - (1024 + 128).
  FLASHCORE_HD static std::uint32_t integers(std::uint32_t bytes) {
    using detail::both_halves;
    const std::uint32_t shifted = (bytes & both_halves(0xff)) | both_halves(0x6400);
    return detail::fma_halves(shifted, both_halves(0x3c00), both_halves(0xe480));
  }

  /// Floats in the upper bytes of both halves. The lower bytes are ignored.
  FLASHCORE_HD static std::uint32_t floats(std::uint32_t bytes) {
    using detail::both_halves;
    using detail::fma_halves;
    if constexpr (kElement == Element::e5m2) {
      return bytes & both_halves(0xff00);  // e5m2 is the upper byte of f16
    } else {
      // NaN reads as 480 · 2^-8, the only value that overflows times 144 · 2^8; infinity
      // times 0 is NaN.
      constexpr std::uint32_t kNegativeZero = both_halves(0x8000), kZero = 0;
      const std::uint32_t value =
          (bytes & both_halves(0x8000)) | (bytes >> 1 & both_halves(0x3f80));
      const std::uint32_t large = fma_halves(value, both_halves(0x7880), kNegativeZero);
      return fma_halves(large, kZero, value);
    }
  }
};

}  // namespace flashcore::core
