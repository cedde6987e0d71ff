// Instructions that exchange values between the lanes of a warp: shfl, vote, match, redux, elect.
// They wait until all lanes that their mask names have arrived.
#include <cstdint>

#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"

namespace flashcore::emulator {
namespace {

/// The member mask of a collective, the same in all of its lanes.
std::uint32_t members(Warp& w, std::int32_t op, std::uint32_t mask) {
  const std::uint32_t* row = w.in<std::uint32_t>(op);
  const std::uint32_t named = row[__builtin_ctz(mask)];
  if ((named >> __builtin_ctz(mask) & 1) == 0) {
    w.fail("a lane is not in the member mask of its collective", __builtin_ctz(mask));
  }
  return named;
}

enum class Shuffle { idx, up, down, bfly };

template <Shuffle kMode>
Step shfl(Warp& w, const Instruction& i, std::uint32_t mask) {
  const bool has_predicate = i.op_count == 6;
  const int at = has_predicate ? 2 : 1;
  if (!w.converged(mask, members(w, i.ops[at + 3], mask))) return Step::blocked;
  const auto *a = w.in<std::uint32_t>(i.ops[at]), *b = w.in<std::uint32_t>(i.ops[at + 1]),
             *c = w.in<std::uint32_t>(i.ops[at + 2]);
  std::uint32_t results[kLanes], inside = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int segment = static_cast<int>(c[lane] >> 8 & 31), clamp = static_cast<int>(c[lane] & 31);
    const int value = static_cast<int>(b[lane] & 31);
    const int max_lane = (lane & segment) | (clamp & ~segment);
    int from = lane;
    bool valid = true;
    if constexpr (kMode == Shuffle::up) {
      from = lane - value;
      valid = from >= max_lane;
    } else if constexpr (kMode == Shuffle::down) {
      from = lane + value;
      valid = from <= max_lane;
    } else if constexpr (kMode == Shuffle::bfly) {
      from = lane ^ value;
      valid = from <= max_lane;
    } else {
      from = (lane & segment) | (value & ~segment);
      valid = from <= max_lane;
    }
    if (!valid) from = lane;
    results[lane] = a[from & 31];
    inside |= static_cast<std::uint32_t>(valid) << lane;
    if (valid && (mask >> lane & 1) != 0 && (mask >> (from & 31) & 1) == 0)
      results[lane] = 0xffffffffu;
  }
  auto* d = w.out<std::uint32_t>(i.ops[0]);
  for (int lane = 0; lane < kLanes; ++lane)
    d[lane] = (mask >> lane & 1) != 0 ? results[lane] : d[lane];
  if (has_predicate) w.set_predicate(i.ops[1], mask, inside);
  return Step::next;
}

enum class Vote { all, any, uni, ballot };

template <Vote kMode>
Step vote(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint32_t named = members(w, i.ops[2], mask);
  if (!w.converged(mask, named)) return Step::blocked;
  const bool negated = (i.aux & kNegated) != 0;
  const std::uint32_t p = (negated ? ~w.predicate(i.ops[1]) : w.predicate(i.ops[1])) & mask;
  if constexpr (kMode == Vote::ballot) {
    apply(w.out<std::uint32_t>(i.ops[0]), mask, [p] { return p; });
  } else {
    const bool result = kMode == Vote::all   ? p == mask
                        : kMode == Vote::any ? p != 0
                                             : p == 0 || p == mask;
    w.set_predicate(i.ops[0], mask, result ? kFullMask : 0);
  }
  return Step::next;
}

Step active_mask(Warp& w, const Instruction& i, std::uint32_t mask) {
  apply(w.out<std::uint32_t>(i.ops[0]), mask, [mask] { return mask; });
  return Step::next;
}

template <typename T>
Step match_any(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (!w.converged(mask, members(w, i.ops[2], mask))) return Step::blocked;
  const T* a = w.in<T>(i.ops[1]);
  std::uint32_t results[kLanes];
  for_lanes(mask, [&](int lane) {
    results[lane] = 0;
    for_lanes(mask, [&](int other) {
      results[lane] |= static_cast<std::uint32_t>(a[other] == a[lane]) << other;
    });
  });
  for_lanes(mask, [&](int lane) { w.out<std::uint32_t>(i.ops[0])[lane] = results[lane]; });
  return Step::next;
}

struct Add {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b));
  }
};
struct Min {
  template <typename T>
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};
struct Max {
  template <typename T>
  T operator()(T a, T b) const {
    return b > a ? b : a;
  }
};
struct And {
  template <typename T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct Or {
  template <typename T>
  T operator()(T a, T b) const {
    return a | b;
  }
};
struct Xor {
  template <typename T>
  T operator()(T a, T b) const {
    return a ^ b;
  }
};

template <typename T, typename F>
Step redux(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (!w.converged(mask, members(w, i.ops[2], mask))) return Step::blocked;
  const T* a = w.in<T>(i.ops[1]);
  T result = a[__builtin_ctz(mask)];
  for_lanes(mask & (mask - 1), [&](int lane) { result = F()(result, a[lane]); });
  apply(w.out<T>(i.ops[0]), mask, [result] { return result; });
  return Step::next;
}

template <typename T>
Handler find_redux(const Opcode& opcode) {
  if (opcode.has("add")) return redux<T, Add>;
  if (opcode.has("min")) return redux<T, Min>;
  if (opcode.has("max")) return redux<T, Max>;
  if (opcode.has("and")) return redux<T, And>;
  if (opcode.has("or")) return redux<T, Or>;
  if (opcode.has("xor")) return redux<T, Xor>;
  return nullptr;
}

/// elect.sync d|p, members: p is true in the lowest lane, whose number is d.
Step elect(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (!w.converged(mask, members(w, i.ops[2], mask))) return Step::blocked;
  const auto leader = static_cast<std::uint32_t>(__builtin_ctz(mask));
  apply(w.out<std::uint32_t>(i.ops[0]), mask, [leader] { return leader; });
  w.set_predicate(i.ops[1], mask, 1u << leader);
  return Step::next;
}

Step warp_sync(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (!w.converged(mask, members(w, i.ops[0], mask))) return Step::blocked;
  if (Races* races = w.races()) races->sync_warp(w.thread_of(0), mask);
  return Step::next;
}

}  // namespace

bool find_warp_collective(const Opcode& opcode, Recipe& recipe) {
  recipe.immediate_bytes[0] = 4;
  if (opcode.starts("shfl.sync.idx")) recipe.handler = shfl<Shuffle::idx>;
  if (opcode.starts("shfl.sync.up")) recipe.handler = shfl<Shuffle::up>;
  if (opcode.starts("shfl.sync.down")) recipe.handler = shfl<Shuffle::down>;
  if (opcode.starts("shfl.sync.bfly")) recipe.handler = shfl<Shuffle::bfly>;
  if (opcode.starts("vote.sync")) {
    recipe.immediate_bytes[2] = 4;
    if (opcode.has("all")) recipe.handler = vote<Vote::all>;
    if (opcode.has("any")) recipe.handler = vote<Vote::any>;
    if (opcode.has("uni")) recipe.handler = vote<Vote::uni>;
    if (opcode.has("ballot")) recipe.handler = vote<Vote::ballot>;
  }
  if (opcode.base() == "activemask") recipe.handler = active_mask;
  if (opcode.text() == "match.any.sync.b32") recipe.handler = match_any<std::uint32_t>;
  if (opcode.text() == "match.any.sync.b64") recipe.handler = match_any<std::uint64_t>;
  if (opcode.starts("redux.sync")) {
    recipe.handler = opcode.type() == "s32" ? find_redux<std::int32_t>(opcode)
                                            : find_redux<std::uint32_t>(opcode);
  }
  if (opcode.base() == "elect") {
    recipe.handler = elect;
    recipe.immediate_bytes[2] = 4;
  }
  if (opcode.text() == "bar.warp.sync") recipe.handler = warp_sync;
  return recipe.handler != nullptr;
}

}  // namespace flashcore::emulator
