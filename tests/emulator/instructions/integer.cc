// Integer arithmetic.
#include <cstdint>
#include <limits>
#include <type_traits>

#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"

namespace flashcore::emulator {
namespace {

template <typename T>
using Unsigned = std::make_unsigned_t<T>;

// Unsigned arithmetic wraps, as PTX does.
template <typename T>
struct Add {
  T operator()(T a, T b) const { return static_cast<T>(Unsigned<T>(a) + Unsigned<T>(b)); }
};
template <typename T>
struct Sub {
  T operator()(T a, T b) const { return static_cast<T>(Unsigned<T>(a) - Unsigned<T>(b)); }
};
template <typename T>
struct MulLo {
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  }
};
template <typename T>
using Wider = std::conditional_t<
    sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
    std::conditional_t<sizeof(T) == 4,
                       std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>,
                       std::conditional_t<std::is_signed_v<T>, std::int32_t, std::uint32_t>>>;
template <typename T>
struct MulHi {
  T operator()(T a, T b) const {
    return static_cast<T>((static_cast<Wider<T>>(a) * b) >> (8 * sizeof(T)));
  }
};
template <typename T>
struct MulWide {
  Wider<T> operator()(T a, T b) const { return static_cast<Wider<T>>(a) * b; }
};
template <typename T>
struct MadLo {
  T operator()(T a, T b, T c) const { return Add<T>()(MulLo<T>()(a, b), c); }
};
template <typename T>
struct MadHi {
  T operator()(T a, T b, T c) const { return Add<T>()(MulHi<T>()(a, b), c); }
};
template <typename T>
struct MadWide {
  Wider<T> operator()(T a, T b, Wider<T> c) const {
    return static_cast<Wider<T>>(static_cast<Unsigned<Wider<T>>>(MulWide<T>()(a, b)) +
                                 static_cast<Unsigned<Wider<T>>>(c));
  }
};
/// The result of a division by zero is unspecified; GPUs give all ones.
template <typename T>
struct Div {
  T operator()(T a, T b) const {
    if (b == 0) return static_cast<T>(-1);
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return Sub<T>()(0, a);
    return static_cast<T>(a / b);
  }
};
template <typename T>
struct Rem {
  T operator()(T a, T b) const {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
  }
};
template <typename T>
struct Min {
  T operator()(T a, T b) const { return b < a ? b : a; }
};
template <typename T>
struct Max {
  T operator()(T a, T b) const { return b > a ? b : a; }
};
template <typename T>
struct Neg {
  T operator()(T a) const { return Sub<T>()(0, a); }
};
template <typename T>
struct Abs {
  T operator()(T a) const { return a < 0 ? Sub<T>()(0, a) : a; }
};
template <typename T>
struct Sad {
  T operator()(T a, T b, T c) const { return Add<T>()(c, a > b ? Sub<T>()(a, b) : Sub<T>()(b, a)); }
};

template <typename T>
Handler find_mul(const Opcode& opcode) {
  const bool mad = opcode.base() == "mad";
  if (opcode.has("lo")) return mad ? ternary<T, T, T, T, MadLo<T>> : binary<T, T, T, MulLo<T>>;
  if (opcode.has("hi")) return mad ? ternary<T, T, T, T, MadHi<T>> : binary<T, T, T, MulHi<T>>;
  if constexpr (sizeof(T) < 8) {
    using W = Wider<T>;
    if (opcode.has("wide"))
      return mad ? ternary<W, T, T, W, MadWide<T>> : binary<W, T, T, MulWide<T>>;
  }
  return nullptr;
}

template <typename T>
Handler find_typed(const Opcode& opcode) {
  const std::string_view base = opcode.base();
  if (opcode.has("cc") || opcode.has("sat")) return nullptr;
  if (base == "add") return binary<T, T, T, Add<T>>;
  if (base == "sub") return binary<T, T, T, Sub<T>>;
  if (base == "mul" || base == "mad") return find_mul<T>(opcode);
  if (base == "div") return binary<T, T, T, Div<T>>;
  if (base == "rem") return binary<T, T, T, Rem<T>>;
  if (base == "min") return binary<T, T, T, Min<T>>;
  if (base == "max") return binary<T, T, T, Max<T>>;
  if (base == "neg") return unary<T, T, Neg<T>>;
  if (base == "abs") return unary<T, T, Abs<T>>;
  if (base == "sad") return ternary<T, T, T, T, Sad<T>>;
  return nullptr;
}

}  // namespace

bool find_integer(const Opcode& opcode, Recipe& recipe) {
  const std::string_view type = opcode.type();
  if (type == "s32") recipe.handler = find_typed<std::int32_t>(opcode);
  if (type == "u32") recipe.handler = find_typed<std::uint32_t>(opcode);
  if (type == "s64") recipe.handler = find_typed<std::int64_t>(opcode);
  if (type == "u64") recipe.handler = find_typed<std::uint64_t>(opcode);
  if (type == "s16") recipe.handler = find_typed<std::int16_t>(opcode);
  if (type == "u16") recipe.handler = find_typed<std::uint16_t>(opcode);
  if (opcode.base() == "mad" && opcode.has("wide")) {
    recipe.immediate_bytes[3] = type.ends_with("32") ? 8 : 4;
  }
  return recipe.handler != nullptr;
}

}  // namespace flashcore::emulator
