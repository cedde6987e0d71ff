// Division of counts, which are never negative.
#pragma once

#include <cstdint>

namespace flashcore {

/// Divides in 32 bits if both numbers fit: 64-bit division is several times slower on many CPUs,
/// and a plan needs a hundred divisions.
inline std::int64_t divide(std::int64_t a, std::int64_t b) noexcept {
  const auto fits = [](std::int64_t x) { return x == static_cast<std::uint32_t>(x); };
  if (fits(a) && fits(b)) return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
  return a / b;
}

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept {
  return divide(a + b - 1, b);
}

}  // namespace flashcore
