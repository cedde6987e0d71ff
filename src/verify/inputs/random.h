// Random numbers that are the same on every machine and independent of the order of streams.
#pragma once

#include <cstdint>

namespace flashcore::verify {

/// Hash of 64 bits (splitmix64).
constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(std::uint64_t seed, std::uint64_t stream = 0) : state_(mix(seed ^ mix(stream))) {}

  std::uint64_t bits() { return mix(state_++); }

  /// 0 … count - 1.
  std::int64_t below(std::int64_t count) {
    return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(count));
  }
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
  bool chance(double probability) { return uniform() < probability; }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

  template <typename T, std::size_t kCount>
  const T& pick(const T (&choices)[kCount]) {
    return choices[below(static_cast<std::int64_t>(kCount))];
  }

  /// Mean 0, variance 1: the sum of four uniform 16-bit numbers. One in 64 is multiplied by four to
  /// thicken the tails.
  double normal() {
    const std::uint64_t x = bits();
    const double sum =
        static_cast<double>((x & 0xffff) + ((x >> 16) & 0xffff) + ((x >> 32) & 0xffff) + (x >> 48));
    const double normal = (sum / 65535.0 - 2.0) * 1.5596;  // 1 / sqrt(4/12 * (63 + 16) / 64)
    return (mix(x) & 63) == 0 ? 4.0 * normal : normal;
  }

 private:
  std::uint64_t state_;
};

}  // namespace flashcore::verify
