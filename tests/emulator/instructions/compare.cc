// setp, set and selp.
#include <cstdint>

#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"
#include "emulator/machine/floats.h"

namespace flashcore::emulator {
namespace {

enum class Combine : std::uint32_t { none, and_, or_, xor_ };

struct Equal {
  template <typename T>
  bool operator()(T a, T b) const {
    return a == b;
  }
};
struct NotEqual {  // ordered: false for NaN
  template <typename T>
  bool operator()(T a, T b) const {
    return a < b || a > b;
  }
};
struct Less {
  template <typename T>
  bool operator()(T a, T b) const {
    return a < b;
  }
};
struct LessEqual {
  template <typename T>
  bool operator()(T a, T b) const {
    return a <= b;
  }
};
struct Greater {
  template <typename T>
  bool operator()(T a, T b) const {
    return a > b;
  }
};
struct GreaterEqual {
  template <typename T>
  bool operator()(T a, T b) const {
    return a >= b;
  }
};
struct IsNan {
  template <typename T>
  bool operator()(T a, T b) const {
    return a != a || b != b;
  }
};
/// The unordered form of a comparison, and .num, are negations of ordered ones.
template <typename F>
struct Not {
  template <typename T>
  bool operator()(T a, T b) const {
    return !F()(a, b);
  }
};

/// setp d[|e], a, b[, c]: aux is the combination with c. e gets the negated comparison.
template <typename T, typename F>
Step setp(Warp& w, const Instruction& i, std::uint32_t mask) {
  const auto combine = static_cast<Combine>(i.aux & 3);
  const bool has_second = (i.aux & 4) != 0;
  const int first = has_second ? 2 : 1;
  const T *a = w.in<T>(i.ops[first]), *b = w.in<T>(i.ops[first + 1]);
  std::uint32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    result |= static_cast<std::uint32_t>(F()(a[lane], b[lane])) << lane;
  }
  std::uint32_t negated = ~result;
  if (combine != Combine::none) {
    const std::uint32_t given = w.predicate(i.ops[first + 2]);
    const std::uint32_t c = (i.aux & kNegated) != 0 ? ~given : given;
    const auto with = [&](std::uint32_t x) {
      return combine == Combine::and_ ? x & c : combine == Combine::or_ ? x | c : x ^ c;
    };
    result = with(result);
    negated = with(negated);
  }
  w.set_predicate(i.ops[0], mask, result);
  if (has_second) w.set_predicate(i.ops[1], mask, negated);
  return Step::next;
}

template <typename T>
Handler find_setp(std::string_view compare) {
  if (compare == "eq") return setp<T, Equal>;
  if (compare == "ne") return setp<T, NotEqual>;
  if (compare == "lt" || compare == "lo") return setp<T, Less>;
  if (compare == "le" || compare == "ls") return setp<T, LessEqual>;
  if (compare == "gt" || compare == "hi") return setp<T, Greater>;
  if (compare == "ge" || compare == "hs") return setp<T, GreaterEqual>;
  if (compare == "equ") return setp<T, Not<NotEqual>>;
  if (compare == "neu") return setp<T, Not<Equal>>;
  if (compare == "ltu") return setp<T, Not<GreaterEqual>>;
  if (compare == "leu") return setp<T, Not<Greater>>;
  if (compare == "gtu") return setp<T, Not<LessEqual>>;
  if (compare == "geu") return setp<T, Not<Less>>;
  if (compare == "nan") return setp<T, IsNan>;
  if (compare == "num") return setp<T, Not<IsNan>>;
  return nullptr;
}

Handler find_setp_of(std::string_view type, std::string_view compare) {
  if (type == "f32") return find_setp<float>(compare);
  if (type == "f64") return find_setp<double>(compare);
  if (type == "f16") return find_setp<Half>(compare);
  if (type == "s32") return find_setp<std::int32_t>(compare);
  if (type == "u32" || type == "b32") return find_setp<std::uint32_t>(compare);
  if (type == "s64") return find_setp<std::int64_t>(compare);
  if (type == "u64" || type == "b64") return find_setp<std::uint64_t>(compare);
  if (type == "s16") return find_setp<std::int16_t>(compare);
  if (type == "u16" || type == "b16") return find_setp<std::uint16_t>(compare);
  return nullptr;
}

template <typename T>
Step selp(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint32_t choose = w.predicate(i.ops[3]);
  const T *a = w.in<T>(i.ops[1]), *b = w.in<T>(i.ops[2]);
  T* d = w.out<T>(i.ops[0]);
  T results[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    results[lane] = (choose >> lane & 1) != 0 ? a[lane] : b[lane];
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    d[lane] = (mask >> lane & 1) != 0 ? results[lane] : d[lane];
  }
  return Step::next;
}

}  // namespace

bool find_compare(const Opcode& opcode, Recipe& recipe) {
  const std::string_view type = opcode.type();
  if (opcode.base() == "setp" && opcode.parts().size() >= 3) {
    recipe.handler = find_setp_of(type, opcode.parts()[1]);
    if (opcode.has("and")) recipe.aux = static_cast<std::uint32_t>(Combine::and_);
    if (opcode.has("or")) recipe.aux = static_cast<std::uint32_t>(Combine::or_);
    if (opcode.has("xor")) recipe.aux = static_cast<std::uint32_t>(Combine::xor_);
  } else if (opcode.base() == "selp") {
    if (type.ends_with("64")) recipe.handler = selp<std::uint64_t>;
    if (type.ends_with("32")) recipe.handler = selp<std::uint32_t>;
    if (type.ends_with("16")) recipe.handler = selp<std::uint16_t>;
  }
  return recipe.handler != nullptr;
}

}  // namespace flashcore::emulator
