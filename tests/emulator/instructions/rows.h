// Loops over the lanes of rows, which the compiler turns into vector code.
#pragma once

#include <cstdint>

#include "emulator/machine/warp.h"

namespace flashcore::emulator {

/// d = f(operands…) for the lanes of `mask`. Inactive lanes compute too, without effect.
template <typename D, typename F, typename... T>
inline void apply(D* d, std::uint32_t mask, F f, const T*... operands) {
  if (mask == kFullMask) {
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) d[lane] = f(operands[lane]...);
    return;
  }
  D results[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) results[lane] = f(operands[lane]...);
  for (int lane = 0; lane < kLanes; ++lane) {
    d[lane] = (mask >> lane & 1) != 0 ? results[lane] : d[lane];
  }
}

template <typename D, typename A, typename F>
Step unary(Warp& w, const Instruction& i, std::uint32_t mask) {
  apply(w.out<D>(i.ops[0]), mask, F(), w.in<A>(i.ops[1]));
  return Step::next;
}
template <typename D, typename A, typename B, typename F>
Step binary(Warp& w, const Instruction& i, std::uint32_t mask) {
  apply(w.out<D>(i.ops[0]), mask, F(), w.in<A>(i.ops[1]), w.in<B>(i.ops[2]));
  return Step::next;
}
template <typename D, typename A, typename B, typename C, typename F>
Step ternary(Warp& w, const Instruction& i, std::uint32_t mask) {
  apply(w.out<D>(i.ops[0]), mask, F(), w.in<A>(i.ops[1]), w.in<B>(i.ops[2]), w.in<C>(i.ops[3]));
  return Step::next;
}

/// Calls f(lane) for the lanes of the mask.
template <typename F>
inline void for_lanes(std::uint32_t mask, F f) {
  for (; mask != 0; mask &= mask - 1) f(__builtin_ctz(mask));
}

}  // namespace flashcore::emulator
