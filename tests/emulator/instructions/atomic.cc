// atom and red.
#include <cstdint>

#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"
#include "emulator/machine/floats.h"

namespace flashcore::emulator {
namespace {

constexpr std::uint32_t kSpaceBits = 7, kReturns = 8;

struct Add {
  template <typename T>
  T operator()(T old, T x) const {
    return static_cast<T>(old + x);
  }
};
struct Min {
  template <typename T>
  T operator()(T old, T x) const {
    return x < old ? x : old;
  }
};
struct Max {
  template <typename T>
  T operator()(T old, T x) const {
    return x > old ? x : old;
  }
};
struct And {
  template <typename T>
  T operator()(T old, T x) const {
    return old & x;
  }
};
struct Or {
  template <typename T>
  T operator()(T old, T x) const {
    return old | x;
  }
};
struct Xor {
  template <typename T>
  T operator()(T old, T x) const {
    return old ^ x;
  }
};
struct Exchange {
  template <typename T>
  T operator()(T, T x) const {
    return x;
  }
};
struct Increment {
  template <typename T>
  T operator()(T old, T x) const {
    return old >= x ? T{0} : old + 1;
  }
};
struct Decrement {
  template <typename T>
  T operator()(T old, T x) const {
    return old == 0 || old > x ? x : old - 1;
  }
};
template <std::uint16_t (*kRound)(float), float (*kRead)(std::uint16_t)>
struct AddPair {
  std::uint32_t operator()(std::uint32_t old, std::uint32_t x) const {
    const auto sum = [&](int shift) {
      return static_cast<std::uint32_t>(kRound(kRead(static_cast<std::uint16_t>(old >> shift)) +
                                               kRead(static_cast<std::uint16_t>(x >> shift))))
             << shift;
    };
    return sum(16) | sum(0);
  }
};

/// atom d…, [address], b… and red [address], b…, of kCount adjacent elements.
template <typename T, typename F, int kCount = 1>
Step atomic(Warp& w, const Instruction& i, std::uint32_t mask) {
  const auto space = static_cast<Space>(i.aux & kSpaceBits);
  const bool returns = (i.aux & kReturns) != 0;
  const int at = returns ? kCount : 0;
  constexpr int kBytes = sizeof(T) * kCount;
  for_lanes(mask, [&](int lane) {
    std::uint8_t* memory = w.resolve(space, w.address(i, at, lane), kBytes, kBytes, lane);
    for (int k = 0; k < kCount; ++k) {
      T old;
      __builtin_memcpy(&old, memory + k * sizeof(T), sizeof old);
      const T value = F()(old, w.in<T>(i.ops[at + 1 + k])[lane]);
      __builtin_memcpy(memory + k * sizeof(T), &value, sizeof value);
      if (returns) w.out<T>(i.ops[k])[lane] = old;
    }
  });
  return Step::next;
}

template <typename T>
Step compare_and_swap(Warp& w, const Instruction& i, std::uint32_t mask) {
  const auto space = static_cast<Space>(i.aux & kSpaceBits);
  for_lanes(mask, [&](int lane) {
    std::uint8_t* memory = w.resolve(space, w.address(i, 1, lane), sizeof(T), sizeof(T), lane);
    T old;
    __builtin_memcpy(&old, memory, sizeof old);
    const T value = old == w.in<T>(i.ops[2])[lane] ? w.in<T>(i.ops[3])[lane] : old;
    __builtin_memcpy(memory, &value, sizeof value);
    w.out<T>(i.ops[0])[lane] = old;
  });
  return Step::next;
}

template <typename T>
Handler find_integer_op(const Opcode& opcode) {
  if (opcode.has("add")) return atomic<T, Add>;
  if (opcode.has("min")) return atomic<T, Min>;
  if (opcode.has("max")) return atomic<T, Max>;
  if (opcode.has("and")) return atomic<T, And>;
  if (opcode.has("or")) return atomic<T, Or>;
  if (opcode.has("xor")) return atomic<T, Xor>;
  if (opcode.has("exch")) return atomic<T, Exchange>;
  if (opcode.has("inc")) return atomic<T, Increment>;
  if (opcode.has("dec")) return atomic<T, Decrement>;
  if (opcode.has("cas")) return compare_and_swap<T>;
  return nullptr;
}

Handler find_float_op(const Opcode& opcode, std::string_view type) {
  if (!opcode.has("add")) return nullptr;
  const int count = opcode.vector_size();
  if (type == "f32") {
    return count == 4   ? atomic<float, Add, 4>
           : count == 2 ? atomic<float, Add, 2>
                        : atomic<float, Add>;
  }
  if (type == "f64" && count == 1) return atomic<double, Add>;
  using PairF16 = AddPair<float_to_half, half_to_float>;
  using PairBf16 = AddPair<float_to_bfloat, bfloat_to_float>;
  if (type == "f16x2") {
    return count == 4   ? atomic<std::uint32_t, PairF16, 4>
           : count == 2 ? atomic<std::uint32_t, PairF16, 2>
                        : atomic<std::uint32_t, PairF16>;
  }
  if (type == "bf16x2") {
    return count == 4   ? atomic<std::uint32_t, PairBf16, 4>
           : count == 2 ? atomic<std::uint32_t, PairBf16, 2>
                        : atomic<std::uint32_t, PairBf16>;
  }
  return nullptr;
}

}  // namespace

bool find_atomic(const Opcode& opcode, Recipe& recipe) {
  const std::string_view base = opcode.base(), type = opcode.type();
  if ((base != "atom" && base != "red") || opcode.has("async")) return false;
  recipe.aux = static_cast<std::uint32_t>(opcode.space()) | (base == "atom" ? kReturns : 0);
  recipe.handler = find_float_op(opcode, type);
  if (recipe.handler != nullptr || opcode.vector_size() != 1) return recipe.handler != nullptr;
  if (type == "u32" || type == "b32") recipe.handler = find_integer_op<std::uint32_t>(opcode);
  if (type == "s32") recipe.handler = find_integer_op<std::int32_t>(opcode);
  if (type == "u64" || type == "b64") recipe.handler = find_integer_op<std::uint64_t>(opcode);
  if (type == "s64") recipe.handler = find_integer_op<std::int64_t>(opcode);
  return recipe.handler != nullptr;
}

}  // namespace flashcore::emulator
