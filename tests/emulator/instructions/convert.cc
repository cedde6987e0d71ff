// cvt.
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"
#include "emulator/machine/floats.h"

namespace flashcore::emulator {
namespace {

/// Tags: the bits of these formats are unsigned integers.
struct F16 {};
struct Bf16 {};

template <typename T>
struct Storage {
  using type = T;
};
template <>
struct Storage<F16> {
  using type = std::uint16_t;
};
template <>
struct Storage<Bf16> {
  using type = std::uint16_t;
};
template <typename T>
using Bits = typename Storage<T>::type;

template <typename T>
auto load(Bits<T> bits) {
  if constexpr (std::is_same_v<T, F16>) return half_to_float(bits);
  if constexpr (std::is_same_v<T, Bf16>) return bfloat_to_float(bits);
  if constexpr (!std::is_same_v<T, F16> && !std::is_same_v<T, Bf16>) return bits;
}

enum class Round { none, to_int_even, to_int_zero, to_int_down, to_int_up };

template <Round kRound, typename T>
T round_to_integral(T x) {
  if constexpr (kRound == Round::to_int_even) return std::nearbyint(x);
  if constexpr (kRound == Round::to_int_zero) return std::trunc(x);
  if constexpr (kRound == Round::to_int_down) return std::floor(x);
  if constexpr (kRound == Round::to_int_up) return std::ceil(x);
  return x;
}

template <typename D, typename A, Round kRound, bool kSaturate>
struct Convert {
  Bits<D> operator()(Bits<A> bits) const {
    const auto x = round_to_integral_if_float(load<A>(bits));
    using X = std::remove_cvref_t<decltype(x)>;
    if constexpr (std::is_same_v<D, F16>) {
      return float_to_half(saturated(static_cast<float>(x)));
    } else if constexpr (std::is_same_v<D, Bf16>) {
      return float_to_bfloat(saturated(static_cast<float>(x)));
    } else if constexpr (std::is_floating_point_v<D>) {
      return saturated(static_cast<D>(x));
    } else if constexpr (std::is_floating_point_v<X>) {
      if (x != x) return sizeof(D) == 8 ? static_cast<D>(std::uint64_t{1} << 63) : D{0};
      if (x <= static_cast<X>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
      if (x >= static_cast<X>(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
      return static_cast<D>(x);
    } else if constexpr (kSaturate) {
      const __int128 wide = x;
      if (wide < std::numeric_limits<D>::min()) return std::numeric_limits<D>::min();
      if (wide > std::numeric_limits<D>::max()) return std::numeric_limits<D>::max();
      return static_cast<D>(x);
    } else {
      return static_cast<D>(x);
    }
  }

 private:
  template <typename T>
  static T round_to_integral_if_float(T x) {
    if constexpr (std::is_floating_point_v<T>) return round_to_integral<kRound>(x);
    return x;
  }
  template <typename T>
  static T saturated(T x) {
    return !kSaturate ? x : x > T{1} ? T{1} : x > T{0} ? x : T{0};
  }
};

/// Registers may be wider than the types: the value is at the start, and results are extended.
template <typename D, typename A, typename F>
Step convert(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (i.first_bytes == sizeof(D) && i.second_bytes == sizeof(A)) {
    apply(w.out<D>(i.ops[0]), mask, F(), w.in<A>(i.ops[1]));
    return Step::next;
  }
  std::uint8_t* d = w.out<std::uint8_t>(i.ops[0]);
  for_lanes(mask, [&](int lane) {
    const D result = F()(w.lane_value<A>(i.ops[1], i.second_bytes, lane));
    std::uint64_t wide = 0;
    if constexpr (std::is_integral_v<D>) {
      wide = static_cast<std::uint64_t>(static_cast<std::int64_t>(result));
    } else {
      __builtin_memcpy(&wide, &result, sizeof result);
    }
    __builtin_memcpy(d + lane * i.first_bytes, &wide, i.first_bytes);
  });
  return Step::next;
}

template <typename D, typename A, bool kSaturate>
Handler with_rounding(const Opcode& opcode) {
  using F0 = Convert<D, A, Round::none, kSaturate>;
  if constexpr (!std::is_integral_v<A>) {
    if (opcode.has("rni"))
      return convert<Bits<D>, Bits<A>, Convert<D, A, Round::to_int_even, kSaturate>>;
    if (opcode.has("rzi"))
      return convert<Bits<D>, Bits<A>, Convert<D, A, Round::to_int_zero, kSaturate>>;
    if (opcode.has("rmi"))
      return convert<Bits<D>, Bits<A>, Convert<D, A, Round::to_int_down, kSaturate>>;
    if (opcode.has("rpi"))
      return convert<Bits<D>, Bits<A>, Convert<D, A, Round::to_int_up, kSaturate>>;
  }
  return convert<Bits<D>, Bits<A>, F0>;
}
template <typename D, typename A>
Handler with_types(const Opcode& opcode) {
  return opcode.has("sat") ? with_rounding<D, A, true>(opcode) : with_rounding<D, A, false>(opcode);
}

template <typename D>
Handler find_from(const Opcode& opcode, std::string_view from) {
  if (from == "f32") return with_types<D, float>(opcode);
  if (from == "f64") return with_types<D, double>(opcode);
  if (from == "f16") return with_types<D, F16>(opcode);
  if (from == "bf16") return with_types<D, Bf16>(opcode);
  if (from == "s8") return with_types<D, std::int8_t>(opcode);
  if (from == "u8") return with_types<D, std::uint8_t>(opcode);
  if (from == "s16") return with_types<D, std::int16_t>(opcode);
  if (from == "u16") return with_types<D, std::uint16_t>(opcode);
  if (from == "s32") return with_types<D, std::int32_t>(opcode);
  if (from == "u32") return with_types<D, std::uint32_t>(opcode);
  if (from == "s64") return with_types<D, std::int64_t>(opcode);
  if (from == "u64") return with_types<D, std::uint64_t>(opcode);
  return nullptr;
}

Handler find_scalar(const Opcode& opcode, std::string_view to, std::string_view from) {
  if (to == "f32") return find_from<float>(opcode, from);
  if (to == "f64") return find_from<double>(opcode, from);
  if (to == "f16") return find_from<F16>(opcode, from);
  if (to == "bf16") return find_from<Bf16>(opcode, from);
  if (to == "s8") return find_from<std::int8_t>(opcode, from);
  if (to == "u8") return find_from<std::uint8_t>(opcode, from);
  if (to == "s16") return find_from<std::int16_t>(opcode, from);
  if (to == "u16") return find_from<std::uint16_t>(opcode, from);
  if (to == "s32") return find_from<std::int32_t>(opcode, from);
  if (to == "u32") return find_from<std::uint32_t>(opcode, from);
  if (to == "s64") return find_from<std::int64_t>(opcode, from);
  if (to == "u64") return find_from<std::uint64_t>(opcode, from);
  return nullptr;
}

/// Two floats to a pair; the first operand becomes the upper half.
template <std::uint16_t (*kRoundTo)(float), bool kRelu>
struct PackPair {
  std::uint32_t operator()(float high, float low) const {
    if (kRelu) {
      high = high > 0.f || high != high ? high : 0.f;
      low = low > 0.f || low != low ? low : 0.f;
    }
    return static_cast<std::uint32_t>(kRoundTo(high)) << 16 | kRoundTo(low);
  }
};
template <int kMantissa>
struct PackFp8 {
  std::uint16_t operator()(float high, float low) const {
    return static_cast<std::uint16_t>(encode_fp8<kMantissa>(high) << 8 |
                                      encode_fp8<kMantissa>(low));
  }
};
template <int kMantissa>
struct PackFp8FromHalves {
  std::uint16_t operator()(std::uint32_t pair) const {
    return PackFp8<kMantissa>()(half_to_float(static_cast<std::uint16_t>(pair >> 16)),
                                half_to_float(static_cast<std::uint16_t>(pair)));
  }
};
template <int kMantissa>
struct UnpackFp8 {
  std::uint32_t operator()(std::uint16_t pair) const {
    const auto half = [](int code) {
      return float_to_half(decode_fp8<kMantissa>(static_cast<std::uint8_t>(code)));
    };
    return static_cast<std::uint32_t>(half(pair >> 8)) << 16 | half(pair & 0xff);
  }
};

Handler find_pair(const Opcode& opcode, std::string_view to, std::string_view from) {
  using W = std::uint32_t;
  using H = std::uint16_t;
  const bool relu = opcode.has("relu");
  if (from == "f32" && opcode.has("rz")) return nullptr;
  if (to == "f16x2" && from == "f32") {
    return relu ? binary<W, float, float, PackPair<float_to_half, true>>
                : binary<W, float, float, PackPair<float_to_half, false>>;
  }
  if (to == "bf16x2" && from == "f32") {
    return relu ? binary<W, float, float, PackPair<float_to_bfloat, true>>
                : binary<W, float, float, PackPair<float_to_bfloat, false>>;
  }
  if (relu) return nullptr;
  if (to == "e4m3x2" && from == "f32") return binary<H, float, float, PackFp8<3>>;
  if (to == "e5m2x2" && from == "f32") return binary<H, float, float, PackFp8<2>>;
  if (to == "e4m3x2" && from == "f16x2") return unary<H, W, PackFp8FromHalves<3>>;
  if (to == "e5m2x2" && from == "f16x2") return unary<H, W, PackFp8FromHalves<2>>;
  if (to == "f16x2" && from == "e4m3x2") return unary<W, H, UnpackFp8<3>>;
  if (to == "f16x2" && from == "e5m2x2") return unary<W, H, UnpackFp8<2>>;
  return nullptr;
}

}  // namespace

bool find_convert(const Opcode& opcode, Recipe& recipe) {
  if (opcode.base() != "cvt") return false;
  const auto types = opcode.types();
  if (types.size() != 2 || opcode.has("rm") || opcode.has("rp")) return false;
  recipe.handler = find_pair(opcode, types[0], types[1]);
  if (recipe.handler == nullptr && !opcode.has("rz")) {
    recipe.handler = find_scalar(opcode, types[0], types[1]);
  }
  return recipe.handler != nullptr;
}

}  // namespace flashcore::emulator
