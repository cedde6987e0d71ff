// f16 and bf16 arithmetic, single and packed in pairs: computed in double, rounded to the format.
// Only an fma of operands of very different magnitudes is rounded twice, first to 53 bits.
#include <cmath>
#include <cstdint>

#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"
#include "emulator/machine/floats.h"

namespace flashcore::emulator {
namespace {

/// Rounds to f16 without a double rounding through float.
std::uint16_t round_to_half(double x) {
  if (x != x) return 0x7fff;
  return std::bit_cast<std::uint16_t>(static_cast<Half>(x));
}
/// Rounding to float first may round a tie twice, so ties are broken by the lost part.
std::uint16_t round_to_bfloat(double x) {
  float nearest = static_cast<float>(x);
  if (std::isfinite(nearest) && nearest != x &&
      (std::bit_cast<std::uint32_t>(nearest) & 0xffff) == 0x8000) {
    nearest = std::nextafterf(nearest, nearest < x ? INFINITY : -INFINITY);
  }
  return float_to_bfloat(nearest);
}

struct F16 {
  static double read(std::uint16_t bits) { return half_to_float(bits); }
  static std::uint16_t round(double x) { return round_to_half(x); }
};
struct Bf16 {
  static double read(std::uint16_t bits) { return bfloat_to_float(bits); }
  static std::uint16_t round(double x) { return round_to_bfloat(x); }
};

struct Add {
  double operator()(double a, double b) const { return a + b; }
};
struct Sub {
  double operator()(double a, double b) const { return a - b; }
};
struct Mul {
  double operator()(double a, double b) const { return a * b; }
};
struct Fma {
  double operator()(double a, double b, double c) const { return std::fma(a, b, c); }
};
struct Min {
  double operator()(double a, double b) const { return std::fmin(a, b); }
};
struct Max {
  double operator()(double a, double b) const { return std::fmax(a, b); }
};
struct Neg {
  double operator()(double a) const { return -a; }
};
struct Abs {
  double operator()(double a) const { return std::fabs(a); }
};
struct Exp2 {
  double operator()(double a) const { return std::exp2(a); }
};
struct Tanh {
  double operator()(double a) const { return std::tanh(a); }
};

/// One element, or two in the halves of a word.
template <typename Format, typename Op>
struct OnElement {
  template <typename... T>
  std::uint16_t operator()(T... bits) const {
    return Format::round(Op()(Format::read(bits)...));
  }
};
template <typename Format, typename Op>
struct OnPair {
  template <typename... T>
  std::uint32_t operator()(T... bits) const {
    const OnElement<Format, Op> one;
    return static_cast<std::uint32_t>(one(static_cast<std::uint16_t>(bits >> 16)...)) << 16 |
           one(static_cast<std::uint16_t>(bits)...);
  }
};

template <typename Word, typename Format, template <typename, typename> typename On>
Handler find_in(const Opcode& opcode) {
  const std::string_view base = opcode.base();
  if (opcode.has("sat") || opcode.has("relu") || opcode.has("NaN")) return nullptr;
  if (base == "add") return binary<Word, Word, Word, On<Format, Add>>;
  if (base == "sub") return binary<Word, Word, Word, On<Format, Sub>>;
  if (base == "mul") return binary<Word, Word, Word, On<Format, Mul>>;
  if (base == "fma") return ternary<Word, Word, Word, Word, On<Format, Fma>>;
  if (base == "min") return binary<Word, Word, Word, On<Format, Min>>;
  if (base == "max") return binary<Word, Word, Word, On<Format, Max>>;
  if (base == "neg") return unary<Word, Word, On<Format, Neg>>;
  if (base == "abs") return unary<Word, Word, On<Format, Abs>>;
  if (base == "ex2") return unary<Word, Word, On<Format, Exp2>>;
  if (base == "tanh") return unary<Word, Word, On<Format, Tanh>>;
  return nullptr;
}

}  // namespace

bool find_half(const Opcode& opcode, Recipe& recipe) {
  const std::string_view type = opcode.type();
  if (type == "f16") recipe.handler = find_in<std::uint16_t, F16, OnElement>(opcode);
  if (type == "bf16") recipe.handler = find_in<std::uint16_t, Bf16, OnElement>(opcode);
  if (type == "f16x2") recipe.handler = find_in<std::uint32_t, F16, OnPair>(opcode);
  if (type == "bf16x2") recipe.handler = find_in<std::uint32_t, Bf16, OnPair>(opcode);
  return recipe.handler != nullptr;
}

}  // namespace flashcore::emulator
