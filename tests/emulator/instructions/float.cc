// f32 and f64 arithmetic. Approximate instructions are rounded to the nearest here: an error of
// less than the hardware's, which the bounds of the checks allow for.
#include <cmath>
#include <cstdint>

#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"
#include "emulator/machine/floats.h"

namespace flashcore::emulator {
namespace {

template <typename T>
struct Add {
  T operator()(T a, T b) const { return a + b; }
};
template <typename T>
struct Sub {
  T operator()(T a, T b) const { return a - b; }
};
template <typename T>
struct Mul {
  T operator()(T a, T b) const { return a * b; }
};
template <typename T>
struct Div {
  T operator()(T a, T b) const { return a / b; }
};
template <typename T>
struct Fma {
  T operator()(T a, T b, T c) const {
    return sizeof(T) == 4 ? static_cast<T>(__builtin_fmaf(a, b, c))
                          : static_cast<T>(__builtin_fma(a, b, c));
  }
};
// NaN only if both operands are NaN; +0 is larger than -0.
template <typename T>
struct Min {
  T operator()(T a, T b) const {
    const T smaller = a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
    return a != a ? b : b != b ? a : smaller;
  }
};
template <typename T>
struct Max {
  T operator()(T a, T b) const {
    const T larger = a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
    return a != a ? b : b != b ? a : larger;
  }
};
template <typename Op>
struct OrNan {
  template <typename T>
  T operator()(T a, T b) const {
    return a != a ? a : b != b ? b : Op()(a, b);
  }
};
template <typename T>
struct Neg {
  T operator()(T a) const { return -a; }
};
template <typename T>
struct Abs {
  T operator()(T a) const { return a < 0 ? -a : a == 0 ? T{0} : a; }
};
template <typename T>
struct CopySign {
  T operator()(T sign, T magnitude) const { return std::copysign(magnitude, sign); }
};
template <typename T>
struct Reciprocal {
  T operator()(T a) const { return T{1} / a; }
};
template <typename T>
struct SquareRoot {
  T operator()(T a) const { return std::sqrt(a); }
};
template <typename T>
struct ReciprocalRoot {
  T operator()(T a) const { return static_cast<T>(1.0 / std::sqrt(static_cast<double>(a))); }
};
struct Exp2 {
  float operator()(float x) const { return exp2_of(x); }
};
struct Log2 {
  float operator()(float x) const { return static_cast<float>(std::log2(static_cast<double>(x))); }
};
struct Sine {
  float operator()(float x) const { return static_cast<float>(std::sin(static_cast<double>(x))); }
};
struct Cosine {
  float operator()(float x) const { return static_cast<float>(std::cos(static_cast<double>(x))); }
};
struct Tanh {
  float operator()(float x) const { return static_cast<float>(std::tanh(static_cast<double>(x))); }
};
/// .ftz: subnormal operands and results are zero.
template <typename Op>
struct Ftz {
  template <typename... T>
  float operator()(T... operands) const {
    return flush(Op()(flush(operands)...));
  }
};
template <typename Op>
struct Saturate {
  template <typename... T>
  float operator()(T... operands) const {
    const float x = Op()(operands...);
    return x > 1.f ? 1.f : x > 0.f ? x : 0.f;
  }
};

template <typename F>
Handler one(const Opcode& opcode) {
  return opcode.has("ftz") ? unary<float, float, Ftz<F>> : unary<float, float, F>;
}
template <typename F>
Handler two(const Opcode& opcode) {
  if (opcode.has("sat")) return binary<float, float, float, Saturate<F>>;
  return opcode.has("ftz") ? binary<float, float, float, Ftz<F>> : binary<float, float, float, F>;
}
template <typename F>
Handler three(const Opcode& opcode) {
  if (opcode.has("sat")) return ternary<float, float, float, float, Saturate<F>>;
  return opcode.has("ftz") ? ternary<float, float, float, float, Ftz<F>>
                           : ternary<float, float, float, float, F>;
}

bool has_other_rounding(const Opcode& opcode) {
  return opcode.has("rz") || opcode.has("rm") || opcode.has("rp");
}

Handler find_f32(const Opcode& opcode) {
  const std::string_view base = opcode.base();
  if (has_other_rounding(opcode)) return nullptr;
  if (base == "add") return two<Add<float>>(opcode);
  if (base == "sub") return two<Sub<float>>(opcode);
  if (base == "mul") return two<Mul<float>>(opcode);
  if (base == "div") return two<Div<float>>(opcode);
  if (base == "fma" || base == "mad") return three<Fma<float>>(opcode);
  if (base == "min")
    return opcode.has("NaN") ? two<OrNan<Min<float>>>(opcode) : two<Min<float>>(opcode);
  if (base == "max")
    return opcode.has("NaN") ? two<OrNan<Max<float>>>(opcode) : two<Max<float>>(opcode);
  if (base == "neg") return one<Neg<float>>(opcode);
  if (base == "abs") return one<Abs<float>>(opcode);
  if (base == "copysign") return two<CopySign<float>>(opcode);
  if (base == "rcp") return one<Reciprocal<float>>(opcode);
  if (base == "sqrt") return one<SquareRoot<float>>(opcode);
  if (base == "rsqrt") return one<ReciprocalRoot<float>>(opcode);
  if (base == "ex2") return one<Exp2>(opcode);
  if (base == "lg2") return one<Log2>(opcode);
  if (base == "sin") return one<Sine>(opcode);
  if (base == "cos") return one<Cosine>(opcode);
  if (base == "tanh") return one<Tanh>(opcode);
  return nullptr;
}

Handler find_f64(const Opcode& opcode) {
  using D = double;
  const std::string_view base = opcode.base();
  if (has_other_rounding(opcode)) return nullptr;
  if (base == "add") return binary<D, D, D, Add<D>>;
  if (base == "sub") return binary<D, D, D, Sub<D>>;
  if (base == "mul") return binary<D, D, D, Mul<D>>;
  if (base == "div") return binary<D, D, D, Div<D>>;
  if (base == "fma") return ternary<D, D, D, D, Fma<D>>;
  if (base == "min") return binary<D, D, D, Min<D>>;
  if (base == "max") return binary<D, D, D, Max<D>>;
  if (base == "neg") return unary<D, D, Neg<D>>;
  if (base == "abs") return unary<D, D, Abs<D>>;
  if (base == "copysign") return binary<D, D, D, CopySign<D>>;
  if (base == "rcp") return unary<D, D, Reciprocal<D>>;
  if (base == "sqrt") return unary<D, D, SquareRoot<D>>;
  if (base == "rsqrt") return unary<D, D, ReciprocalRoot<D>>;
  return nullptr;
}

}  // namespace

bool find_float(const Opcode& opcode, Recipe& recipe) {
  if (opcode.type() == "f32") recipe.handler = find_f32(opcode);
  if (opcode.type() == "f64") recipe.handler = find_f64(opcode);
  return recipe.handler != nullptr;
}

}  // namespace flashcore::emulator
