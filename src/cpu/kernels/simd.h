// A thin vector layer: Vec<T> holds kLanes<T> numbers. It uses the compilers' vector extension, so
// one source serves every instruction set. target_<isa>.cc defines FLASHCORE_SIMD_BYTES, the
// register width; 0 selects arrays and loops.
//
// Everything is in an anonymous namespace and uses nothing of the standard library: no symbol
// compiled for one instruction set may be visible to code compiled for another.
#pragma once

#include <cstdint>

#include "core/config.h"
#include "core/numeric.h"

#if defined(__ARM_NEON) && FLASHCORE_SIMD_BYTES == 16
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

namespace flashcore::cpu {
namespace {

template <typename T>
struct IntOf;
template <>
struct IntOf<float> {
  using Type = std::int32_t;
};
template <>
struct IntOf<double> {
  using Type = std::int64_t;
};

#if FLASHCORE_SIMD_BYTES == 0

template <typename T>
inline constexpr int kLanes = 16 / static_cast<int>(sizeof(T));

template <typename T>
struct Vec {
  T lane[kLanes<T>];
};

#define FLASHCORE_LANEWISE(expression)  \
  Vec<T> r;                             \
  for (int i = 0; i < kLanes<T>; ++i) { \
    r.lane[i] = expression;             \
  }                                     \
  return r

template <typename T>
FLASHCORE_HD Vec<T> operator+(Vec<T> a, Vec<T> b) {
  FLASHCORE_LANEWISE(a.lane[i] + b.lane[i]);
}
template <typename T>
FLASHCORE_HD Vec<T> operator-(Vec<T> a, Vec<T> b) {
  FLASHCORE_LANEWISE(a.lane[i] - b.lane[i]);
}
template <typename T>
FLASHCORE_HD Vec<T> operator*(Vec<T> a, Vec<T> b) {
  FLASHCORE_LANEWISE(a.lane[i] * b.lane[i]);
}
template <typename T>
FLASHCORE_HD Vec<T> operator/(Vec<T> a, Vec<T> b) {
  FLASHCORE_LANEWISE(a.lane[i] / b.lane[i]);
}
template <typename T>
FLASHCORE_HD Vec<T> splat(T x) {
  FLASHCORE_LANEWISE(x);
}
template <typename T>
FLASHCORE_HD Vec<T> load(const T* p) {
  FLASHCORE_LANEWISE(p[i]);
}
template <typename T>
FLASHCORE_HD void store(T* p, Vec<T> x) {
  for (int i = 0; i < kLanes<T>; ++i) p[i] = x.lane[i];
}
/// a < b ? x : y, per lane. The comparison with a NaN is false.
template <typename T>
FLASHCORE_HD Vec<T> select_less(Vec<T> a, Vec<T> b, Vec<T> x, Vec<T> y) {
  FLASHCORE_LANEWISE(a.lane[i] < b.lane[i] ? x.lane[i] : y.lane[i]);
}
/// 2^n for an integer n, given as a number whose low bits are n plus the bias of the exponent.
template <typename T>
FLASHCORE_HD Vec<T> power_of_two(Vec<T> biased, int mantissa_bits) {
  Vec<T> r;
  for (int i = 0; i < kLanes<T>; ++i) {
    typename IntOf<T>::Type bits;
    __builtin_memcpy(&bits, &biased.lane[i], sizeof bits);
    bits = static_cast<typename IntOf<T>::Type>(static_cast<std::uint64_t>(bits) << mantissa_bits);
    __builtin_memcpy(&r.lane[i], &bits, sizeof bits);
  }
  return r;
}
/// a * b + c, rounded twice: the lanes are ordinary loops, and compilers fuse only some of them.
template <typename T>
FLASHCORE_HD Vec<T> mul_add(Vec<T> a, Vec<T> b, Vec<T> c) {
  FLASHCORE_LANEWISE(a.lane[i] * b.lane[i] + c.lane[i]);
}
#undef FLASHCORE_LANEWISE

#else  // vector extension

template <typename T>
inline constexpr int kLanes = FLASHCORE_SIMD_BYTES / static_cast<int>(sizeof(T));

template <typename T>
struct VecOf {
  typedef T Type __attribute__((vector_size(FLASHCORE_SIMD_BYTES)));
  typedef typename IntOf<T>::Type Bits __attribute__((vector_size(FLASHCORE_SIMD_BYTES)));
  // For loads and stores: aligned like one element.
  typedef T InMemory
      __attribute__((vector_size(FLASHCORE_SIMD_BYTES), aligned(sizeof(T)), may_alias));
};
template <typename T>
using Vec = typename VecOf<T>::Type;

template <typename T>
FLASHCORE_HD Vec<T> splat(T x) {
  return x - Vec<T>{};  // not 0 + x: that would lose the sign of -0
}
template <typename T>
FLASHCORE_HD Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename VecOf<T>::InMemory*>(p);
}
template <typename T>
FLASHCORE_HD void store(T* p, Vec<T> x) {
  *reinterpret_cast<typename VecOf<T>::InMemory*>(p) = x;
}
#define FLASHCORE_FOR_EACH_FLOAT(F) F(float) F(double)
#define FLASHCORE_DEFINE(T)                                                 \
  FLASHCORE_HD Vec<T> select_less(Vec<T> a, Vec<T> b, Vec<T> x, Vec<T> y) { \
    return a < b ? x : y;                                                   \
  }                                                                         \
  FLASHCORE_HD Vec<T> power_of_two(Vec<T> biased, int mantissa_bits) {      \
    typedef typename VecOf<T>::Bits Bits;                                   \
    return (Vec<T>)((Bits)biased << mantissa_bits);                         \
  }
FLASHCORE_FOR_EACH_FLOAT(FLASHCORE_DEFINE)
#undef FLASHCORE_DEFINE
#undef FLASHCORE_FOR_EACH_FLOAT

/// a * b + c, rounded once. Explicit, and compilers fuse nothing else (cmake/cpu_kernels.cmake):
/// they would in some instantiations only, and a row's bits would depend on the number of rows
/// beside it.
FLASHCORE_HD Vec<float> mul_add(Vec<float> a, Vec<float> b, Vec<float> c) {
#if FLASHCORE_SIMD_BYTES == 64
  return (Vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif FLASHCORE_SIMD_BYTES == 32
  return (Vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return (Vec<float>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}
FLASHCORE_HD Vec<double> mul_add(Vec<double> a, Vec<double> b, Vec<double> c) {
#if FLASHCORE_SIMD_BYTES == 64
  return (Vec<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif FLASHCORE_SIMD_BYTES == 32
  return (Vec<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return (Vec<double>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#endif
}

#endif

/// b if b > a, else a. Ignores a NaN in b, as core/softmax.h requires.
template <typename T>
FLASHCORE_HD Vec<T> max_ignore_nan(Vec<T> a, Vec<T> b) {
  // x86's maximum is its second operand unless the first is greater.
#if FLASHCORE_SIMD_BYTES == 64
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_maskz_max_ps(0xffff, (__m512)b, (__m512)a);
#elif FLASHCORE_SIMD_BYTES == 32
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm256_max_ps((__m256)b, (__m256)a);
#endif
  return select_less(a, b, b, a);
}

// Exponentials. Adding a number of the form 1.5 * 2^mantissa_bits rounds to an integer and leaves
// it in the low bits of the sum; kRound* also adds the bias of the exponent.
inline constexpr float kRoundFloat = 12582912.0f + 127.0f;
inline constexpr double kRoundDouble = 6755399441055744.0 + 1023.0;

/// 2^n * 2^f for f in [-1/2, 1/2] and n = biased - kRound*.
/// Relative error of the polynomials: 2.6e-9 (float), 1.8e-17 (double).
FLASHCORE_HD Vec<float> scaled_exp2(Vec<float> f, Vec<float> biased) {
  Vec<float> p = splat(1.5594678e-4f);
  p = mul_add(p, f, splat(1.3406644e-3f));
  p = mul_add(p, f, splat(9.6176930e-3f));
  p = mul_add(p, f, splat(5.5503106e-2f));
  p = mul_add(p, f, splat(2.4022653e-1f));
  p = mul_add(p, f, splat(6.9314721e-1f));
  p = mul_add(p, f, splat(1.0f));
  return p * power_of_two(biased, 23);
}
FLASHCORE_HD Vec<double> scaled_exp2(Vec<double> f, Vec<double> biased) {
  Vec<double> p = splat(4.078071929588336665e-10);
  p = mul_add(p, f, splat(7.0725704128144235096e-9));
  p = mul_add(p, f, splat(1.0180647659234138888e-7));
  p = mul_add(p, f, splat(1.3215442675329822143e-6));
  p = mul_add(p, f, splat(1.5252727385193868197e-5));
  p = mul_add(p, f, splat(1.540353044157213033e-4));
  p = mul_add(p, f, splat(1.3333558153439964747e-3));
  p = mul_add(p, f, splat(9.6181291076070023796e-3));
  p = mul_add(p, f, splat(5.5504108664790394552e-2));
  p = mul_add(p, f, splat(2.4022650695910098007e-1));
  p = mul_add(p, f, splat(6.9314718055994569675e-1));
  p = mul_add(p, f, splat(1.0));
  return p * power_of_two(biased, 52);
}

/// 2^x for x <= 100. Results below the normal range are exactly 0; NaN stays NaN.
template <typename T>
FLASHCORE_HD Vec<T> exp2(Vec<T> x) {
  constexpr bool kIsFloat = sizeof(T) == 4;
  const Vec<T> round = splat(static_cast<T>(kIsFloat ? kRoundFloat : kRoundDouble));
  const Vec<T> biased = x + round;
  return select_less(x, splat(T(kIsFloat ? -126 : -1022)), splat(T(0)),
                     scaled_exp2(x - (biased - round), biased));
}

/// e^x for x <= 69, with one rounding less than exp2(x * log2(e)).
template <typename T>
FLASHCORE_HD Vec<T> exp(Vec<T> x) {
  constexpr bool kIsFloat = sizeof(T) == 4;
  // The smallest x whose result is normal: the logarithm of 2^-126 or 2^-1022, rounded up.
  constexpr T kLeast = kIsFloat ? T(-87.33654f) : T(-708.39641853226408);
  const Vec<T> round = splat(static_cast<T>(kIsFloat ? kRoundFloat : kRoundDouble));
  const Vec<T> log2_e = splat(static_cast<T>(core::kLog2E));
  const Vec<T> biased = mul_add(x, log2_e, round);
  return select_less(x, splat(kLeast), splat(T(0)),
                     scaled_exp2(mul_add(x, log2_e, round - biased), biased));
}

FLASHCORE_HD Vec<float> absolute(Vec<float> x) {
  return select_less(x, splat(0.0f), splat(0.0f) - x, x);
}
FLASHCORE_HD Vec<double> absolute(Vec<double> x) {
  return select_less(x, splat(0.0), splat(0.0) - x, x);
}

#if FLASHCORE_SIMD_BYTES == 64

// Full masks: GCC 12 warns of uninitialised values in the intrinsics without a mask.
inline constexpr __mmask8 kAll8 = 0xff;
inline constexpr __mmask16 kAll16 = 0xffff;

/// Transposes a matrix of 32-bit elements, 16 x 16.
FLASHCORE_HD void transpose_16x16(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_maskz_unpacklo_epi32(kAll16, r[i], r[i + 1]);
    t[i + 1] = _mm512_maskz_unpackhi_epi32(kAll16, r[i], r[i + 1]);
  }
  // r[4 i + c]: in each 128-bit lane L, column 4 L + c of rows 4 i … 4 i + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_maskz_unpacklo_epi64(kAll8, t[i], t[i + 2]);
    r[i + 1] = _mm512_maskz_unpackhi_epi64(kAll8, t[i], t[i + 2]);
    r[i + 2] = _mm512_maskz_unpacklo_epi64(kAll8, t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_maskz_unpackhi_epi64(kAll8, t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i even_01 = _mm512_maskz_shuffle_i32x4(kAll16, r[c], r[4 + c], 0x88);
    const __m512i odd_01 = _mm512_maskz_shuffle_i32x4(kAll16, r[c], r[4 + c], 0xdd);
    const __m512i even_23 = _mm512_maskz_shuffle_i32x4(kAll16, r[8 + c], r[12 + c], 0x88);
    const __m512i odd_23 = _mm512_maskz_shuffle_i32x4(kAll16, r[8 + c], r[12 + c], 0xdd);
    r[c] = _mm512_maskz_shuffle_i32x4(kAll16, even_01, even_23, 0x88);
    r[4 + c] = _mm512_maskz_shuffle_i32x4(kAll16, odd_01, odd_23, 0x88);
    r[8 + c] = _mm512_maskz_shuffle_i32x4(kAll16, even_01, even_23, 0xdd);
    r[12 + c] = _mm512_maskz_shuffle_i32x4(kAll16, odd_01, odd_23, 0xdd);
  }
}

#endif

/// Stores the transpose of a matrix, to[lane * pitch + vector].
template <typename T>
FLASHCORE_HD void store_transposed(T* to, std::int32_t pitch, const Vec<T> (&vectors)[kLanes<T>]) {
#if FLASHCORE_SIMD_BYTES == 64
  if constexpr (sizeof(T) == 4) {
    __m512i m[16];
    for (int i = 0; i < 16; ++i) m[i] = (__m512i)vectors[i];
    transpose_16x16(m);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * pitch, m[i]);
    return;
  }
#endif
  T lanes[kLanes<T>];
  for (int v = 0; v < kLanes<T>; ++v) {
    store(lanes, vectors[v]);
    for (int i = 0; i < kLanes<T>; ++i) to[i * pitch + v] = lanes[i];
  }
}

/// to[column * to_pitch + row] = from[row * from_pitch + column] for kLanes<T> rows.
template <typename T>
FLASHCORE_HD void transpose_rows(T* to, std::int32_t to_pitch, const T* from,
                                 std::int32_t from_pitch, std::int32_t columns) {
  constexpr std::int32_t kSide = kLanes<T>;
  std::int32_t c = 0;
  for (; c + kSide <= columns; c += kSide) {
    Vec<T> row[kSide];
    for (int r = 0; r < kSide; ++r) row[r] = load(from + r * from_pitch + c);
    store_transposed<T>(to + c * to_pitch, to_pitch, row);
  }
  for (; c < columns; ++c) {
    for (int r = 0; r < kSide; ++r) to[c * to_pitch + r] = from[r * from_pitch + c];
  }
}

// 16-bit floats as stored.
struct F16 {
  std::uint16_t bits;
};
struct Bf16 {
  std::uint16_t bits;
};

template <typename Compute>
FLASHCORE_HD Compute widen(Compute x) {
  return x;
}
template <typename Compute>
FLASHCORE_HD Compute widen(F16 x) {
  return core::float_of_f16(x.bits);
}
template <typename Compute>
FLASHCORE_HD Compute widen(Bf16 x) {
  return core::float_of_bf16(x.bits);
}

/// Widens kLanes<Compute> contiguous elements.
FLASHCORE_HD Vec<float> load_widened(const float* from) { return load(from); }
FLASHCORE_HD Vec<double> load_widened(const double* from) { return load(from); }
FLASHCORE_HD Vec<float> load_widened(const F16* from) {
#if defined(__ARM_NEON) && FLASHCORE_SIMD_BYTES == 16
  return (Vec<float>)vcvt_f32_f16(vld1_f16(reinterpret_cast<const float16_t*>(from)));
#elif FLASHCORE_SIMD_BYTES == 64
  return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)from));
#elif FLASHCORE_SIMD_BYTES == 32
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  float lanes[kLanes<float>];
  for (int i = 0; i < kLanes<float>; ++i) lanes[i] = core::float_of_f16(from[i].bits);
  return load(lanes);
#endif
}
FLASHCORE_HD Vec<float> load_widened(const Bf16* from) {
#if FLASHCORE_SIMD_BYTES == 64
  const __m512i bits =
      _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256((const __m256i*)from));
  return (Vec<float>)_mm512_maskz_slli_epi32(0xffff, bits, 16);
#else
  float lanes[kLanes<float>];
  for (int i = 0; i < kLanes<float>; ++i) lanes[i] = core::float_of_bf16(from[i].bits);
  return load(lanes);
#endif
}

template <typename Compute, typename Storage>
FLASHCORE_HD void widen_lanes(Compute* to, const Storage* from) {
  store(to, load_widened(from));
}

}  // namespace
}  // namespace flashcore::cpu
