// 8-bit codes as operands of 16-bit tensor cores: four codes of a register become two registers of
// two f16 each, without a table and without shuffles. Exact for every code of every format, NaN and
// infinities included.
//
// The pairs are codes 0 and 2, and codes 1 and 3: bytes that stand in the same half of a 16-bit
// element, so that nothing has to be moved across. Sixteen codes so stand in the order of
// even_odd_index() (mma_layout.h): who multiplies them brings the other operand into that order or,
// where they are columns of the result, undoes it when that is written.
#pragma once

#include "core/quant_formats.h"

namespace flashcore::core {

struct F16x2Pair {
  std::uint32_t even;  // codes 0 (lower half) and 2
  std::uint32_t odd;   // codes 1 and 3
};

// GPUs from sm_89 on turn e4m3 into f16 in one instruction for two; others, and this code on a CPU,
// shift bits.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
inline constexpr bool kConvertsE4m3 = true;
#else
inline constexpr bool kConvertsE4m3 = false;
#endif

/// What the values of Dequantizer must be multiplied by to be decode()s. f16 has e4m3's values
/// but for a factor: shifted into place, its exponents are read with f16's bias.
FLASHCORE_HD constexpr float code_unit(Element element, bool converts = kConvertsE4m3) {
  return element == Element::e4m3 && !converts ? 256.f : 1.f;
}

/// Four codes of 0.
FLASHCORE_HD constexpr std::uint32_t zero_codes(Element element) {
  return element == Element::u8 ? 0x80808080u : 0u;
}

/// The largest power of two that is not above a positive value, as far as its reciprocal is a
/// normal number too; the nearest such one for any other value.
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

/// a · b + c of both halves, rounded once; subnormals are kept.
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

/// Reads codes of one format. int8 and byte are one: `flip` tells them apart.
template <Element kElement>
struct Dequantizer {
  static_assert(kElement == Element::e4m3 || kElement == Element::e5m2 ||
                kElement == Element::int8);
  std::uint32_t flip;  // of integers: what makes them excess 128

  FLASHCORE_HD explicit Dequantizer(Element element)
      : flip(element == Element::u8 ? 0u : 0x80808080u) {}

  FLASHCORE_HD F16x2Pair operator()(std::uint32_t codes) const {
    if constexpr (kElement == Element::e4m3 && kConvertsE4m3) {
      return converted(codes);
    } else if constexpr (kElement == Element::int8) {
      codes ^= flip;
      return {integers(codes), integers(codes >> 8)};
    } else {
      return {floats(codes << 8), floats(codes)};
    }
  }

 private:
  FLASHCORE_HD static F16x2Pair converted(std::uint32_t codes) {
    F16x2Pair pairs{};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 even, odd;\n"
        "mov.b32 {even, odd}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, even;\n"
        "cvt.rn.f16x2.e4m3x2 %1, odd;\n}\n"
        : "=r"(pairs.even), "=r"(pairs.odd)
        : "r"(__byte_perm(codes, 0, 0x3120)));
#else
    static_cast<void>(codes);
#endif
    return pairs;
  }

  /// Of the codes in the lower bytes of both halves: 1024 + code, less 1024 + 128.
  FLASHCORE_HD static std::uint32_t integers(std::uint32_t codes) {
    using detail::both_halves;
    const std::uint32_t shifted = (codes & both_halves(0xff)) | both_halves(0x6400);
    return detail::fma_halves(shifted, both_halves(0x3c00), both_halves(0xe480));
  }

  /// Of the codes in the upper bytes of both halves; what the lower bytes hold does not matter.
  FLASHCORE_HD static std::uint32_t floats(std::uint32_t codes) {
    using detail::both_halves;
    using detail::fma_halves;
    if constexpr (kElement == Element::e5m2) {
      return codes & both_halves(0xff00);  // f16's upper byte is e5m2
    } else {
      // Times 144 · 2^8 a NaN's 480 overflows, and no other code; infinity times 0 is NaN.
      constexpr std::uint32_t kNegativeZero = both_halves(0x8000), kZero = 0;
      const std::uint32_t value =
          (codes & both_halves(0x8000)) | (codes >> 1 & both_halves(0x3f80));
      const std::uint32_t large = fma_halves(value, both_halves(0x7880), kNegativeZero);
      return fma_halves(large, kZero, value);
    }
  }
};

}  // namespace flashcore::core
