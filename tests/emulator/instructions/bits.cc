// Logic, shifts and bit fields.
#include <cstdint>
#include <type_traits>

#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"

namespace flashcore::emulator {
namespace {

template <typename T>
struct And {
  T operator()(T a, T b) const { return a & b; }
};
template <typename T>
struct Or {
  T operator()(T a, T b) const { return a | b; }
};
template <typename T>
struct Xor {
  T operator()(T a, T b) const { return a ^ b; }
};
template <typename T>
struct Not {
  T operator()(T a) const { return static_cast<T>(~a); }
};
template <typename T>
struct Cnot {
  T operator()(T a) const { return a == 0; }
};
// Shift amounts are clamped to the width.
template <typename T>
struct Shl {
  T operator()(T a, std::uint32_t n) const {
    return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << n);
  }
};
template <typename T>
struct Shr {
  T operator()(T a, std::uint32_t n) const {
    constexpr std::uint32_t kBits = 8 * sizeof(T);
    if constexpr (std::is_signed_v<T>) return static_cast<T>(a >> (n >= kBits ? kBits - 1 : n));
    return n >= kBits ? T{0} : static_cast<T>(a >> n);
  }
};

template <bool kLeft, bool kClamp>
struct Funnel {
  std::uint32_t operator()(std::uint32_t low, std::uint32_t high, std::uint32_t n) const {
    n = kClamp ? (n > 32 ? 32 : n) : n & 31;
    const std::uint64_t both = std::uint64_t{high} << 32 | low;
    return static_cast<std::uint32_t>(kLeft ? (both << n) >> 32 : both >> n);
  }
};

struct Permute {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b, std::uint32_t selector) const {
    const std::uint64_t bytes = std::uint64_t{b} << 32 | a;
    std::uint32_t result = 0;
    for (int k = 0; k < 4; ++k) {
      const std::uint32_t select = selector >> (4 * k);
      std::uint32_t byte = static_cast<std::uint32_t>(bytes >> (8 * (select & 7))) & 0xff;
      if ((select & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;
      result |= byte << (8 * k);
    }
    return result;
  }
};

struct Logic3 {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                           std::uint32_t table) const {
    std::uint32_t result = 0;
    for (std::uint32_t k = 0; k < 8; ++k) {
      if ((table >> k & 1) == 0) continue;
      result |= ((k & 4) != 0 ? a : ~a) & ((k & 2) != 0 ? b : ~b) & ((k & 1) != 0 ? c : ~c);
    }
    return result;
  }
};
Step lop3(Warp& w, const Instruction& i, std::uint32_t mask) {
  apply(w.out<std::uint32_t>(i.ops[0]), mask, Logic3(), w.in<std::uint32_t>(i.ops[1]),
        w.in<std::uint32_t>(i.ops[2]), w.in<std::uint32_t>(i.ops[3]),
        w.in<std::uint32_t>(i.ops[4]));
  return Step::next;
}

template <typename T>
struct ExtractField {
  T operator()(T a, std::uint32_t position, std::uint32_t length) const {
    constexpr int kBits = 8 * sizeof(T);
    const int at = static_cast<int>(position & 0xff), count = static_cast<int>(length & 0xff);
    using U = std::make_unsigned_t<T>;
    const int top = at + count - 1 < kBits - 1 ? at + count - 1 : kBits - 1;
    const bool negative = std::is_signed_v<T> && count != 0 && (U(a) >> top & 1) != 0;
    U result = at >= kBits ? U{0} : U(U(a) >> at);
    const int kept = top - at + 1;
    if (kept < kBits) {
      const U keep = kept <= 0 ? U{0} : U((U{1} << kept) - 1);
      result = negative ? U(result | U(~keep)) : U(result & keep);
    }
    return static_cast<T>(result);
  }
};

template <typename T>
Step insert_field(Warp& w, const Instruction& i, std::uint32_t mask) {
  constexpr std::uint32_t kBits = 8 * sizeof(T);
  for_lanes(mask, [&](int lane) {
    const T a = w.in<T>(i.ops[1])[lane], b = w.in<T>(i.ops[2])[lane];
    const std::uint32_t at = w.in<std::uint32_t>(i.ops[3])[lane] & 0xff;
    const std::uint32_t count = w.in<std::uint32_t>(i.ops[4])[lane] & 0xff;
    const T ones = count >= kBits ? T(~T{0}) : T((T{1} << count) - 1);
    const T field = at >= kBits ? T{0} : T(ones << at);
    w.out<T>(i.ops[0])[lane] = (b & ~field) | (at >= kBits ? T{0} : T((a << at) & field));
  });
  return Step::next;
}

template <typename T, bool kShiftAmount>
struct FindBit {
  std::uint32_t operator()(T a) const {
    using U = std::make_unsigned_t<T>;
    const U bits = std::is_signed_v<T> && a < 0 ? U(~a) : U(a);
    if (bits == 0) return 0xffffffffu;
    const int leading =
        sizeof(T) == 8 ? __builtin_clzll(bits) : __builtin_clz(static_cast<unsigned>(bits));
    return static_cast<std::uint32_t>(kShiftAmount ? leading : int(8 * sizeof(T)) - 1 - leading);
  }
};
template <typename T>
struct LeadingZeros {
  std::uint32_t operator()(T a) const {
    if (a == 0) return 8 * sizeof(T);
    return static_cast<std::uint32_t>(sizeof(T) == 8 ? __builtin_clzll(a)
                                                     : __builtin_clz(static_cast<unsigned>(a)));
  }
};
template <typename T>
struct CountBits {
  std::uint32_t operator()(T a) const {
    return static_cast<std::uint32_t>(__builtin_popcountll(a));
  }
};
template <typename T>
struct ReverseBits {
  T operator()(T a) const {
    T result = 0;
    for (unsigned k = 0; k < 8 * sizeof(T); ++k) result |= T(a >> k & 1) << (8 * sizeof(T) - 1 - k);
    return result;
  }
};

template <typename T>
Handler find_typed(const Opcode& opcode) {
  const std::string_view base = opcode.base();
  if (base == "and") return binary<T, T, T, And<T>>;
  if (base == "or") return binary<T, T, T, Or<T>>;
  if (base == "xor") return binary<T, T, T, Xor<T>>;
  if (base == "not") return unary<T, T, Not<T>>;
  if (base == "cnot") return unary<T, T, Cnot<T>>;
  if (base == "shl") return binary<T, T, std::uint32_t, Shl<T>>;
  if (base == "shr") return binary<T, T, std::uint32_t, Shr<T>>;
  if constexpr (sizeof(T) >= 4) {
    using U = std::make_unsigned_t<T>;
    if (base == "bfe") return ternary<T, T, std::uint32_t, std::uint32_t, ExtractField<T>>;
    if (base == "bfi") return insert_field<U>;
    if (base == "bfind" && opcode.has("shiftamt")) return unary<std::uint32_t, T, FindBit<T, true>>;
    if (base == "bfind") return unary<std::uint32_t, T, FindBit<T, false>>;
    if (base == "clz") return unary<std::uint32_t, U, LeadingZeros<U>>;
    if (base == "popc") return unary<std::uint32_t, U, CountBits<U>>;
    if (base == "brev") return unary<U, U, ReverseBits<U>>;
  }
  return nullptr;
}

/// Predicates are masks, so logic on them is logic on one word.
template <typename F>
Step predicate_logic(Warp& w, const Instruction& i, std::uint32_t mask) {
  w.set_predicate(i.ops[0], mask, F()(w.predicate(i.ops[1]), w.predicate(i.ops[2])));
  return Step::next;
}
Step predicate_not(Warp& w, const Instruction& i, std::uint32_t mask) {
  w.set_predicate(i.ops[0], mask, ~w.predicate(i.ops[1]));
  return Step::next;
}

Handler find_word(const Opcode& opcode) {
  using W = std::uint32_t;
  const bool clamp = opcode.has("clamp");
  if (opcode.starts("shf.l"))
    return clamp ? ternary<W, W, W, W, Funnel<true, true>>
                 : ternary<W, W, W, W, Funnel<true, false>>;
  if (opcode.starts("shf.r"))
    return clamp ? ternary<W, W, W, W, Funnel<false, true>>
                 : ternary<W, W, W, W, Funnel<false, false>>;
  if (opcode.text() == "prmt.b32") return ternary<W, W, W, W, Permute>;
  if (opcode.text() == "lop3.b32") return lop3;
  return nullptr;
}

}  // namespace

bool find_bits(const Opcode& opcode, Recipe& recipe) {
  const std::string_view type = opcode.type();
  if (type == "pred") {
    if (opcode.base() == "and") recipe.handler = predicate_logic<And<std::uint32_t>>;
    if (opcode.base() == "or") recipe.handler = predicate_logic<Or<std::uint32_t>>;
    if (opcode.base() == "xor") recipe.handler = predicate_logic<Xor<std::uint32_t>>;
    if (opcode.base() == "not") recipe.handler = predicate_not;
    return recipe.handler != nullptr;
  }
  recipe.handler = find_word(opcode);
  if (recipe.handler != nullptr) return true;
  if (type == "b32" || type == "u32") recipe.handler = find_typed<std::uint32_t>(opcode);
  if (type == "s32") recipe.handler = find_typed<std::int32_t>(opcode);
  if (type == "b64" || type == "u64") recipe.handler = find_typed<std::uint64_t>(opcode);
  if (type == "s64") recipe.handler = find_typed<std::int64_t>(opcode);
  if (type == "b16" || type == "u16") recipe.handler = find_typed<std::uint16_t>(opcode);
  if (type == "s16") recipe.handler = find_typed<std::int16_t>(opcode);
  if (opcode.base() == "shl" || opcode.base() == "shr") recipe.immediate_bytes[2] = 4;
  if (opcode.base() == "bfe") recipe.immediate_bytes[2] = recipe.immediate_bytes[3] = 4;
  if (opcode.base() == "bfi") recipe.immediate_bytes[3] = recipe.immediate_bytes[4] = 4;
  return recipe.handler != nullptr;
}

}  // namespace flashcore::emulator
