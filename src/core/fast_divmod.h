// Division by a number that is known before a kernel starts, by a multiplication and a shift. A GPU
// divides integers in about thirty dependent instructions, which delay the first loads of a CTA.
#pragma once

#include <cstdint>

#include "core/config.h"

namespace flashcore::core {

struct FastDivmod {
  std::uint32_t value;
  std::uint32_t multiplier;  // ceil(2^(32 + shift) / value); 0 if value is 1
  std::uint32_t shift;       // 2^shift < value <= 2^(shift + 1)
};

FLASHCORE_HD constexpr FastDivmod make_fast_divmod(std::int32_t value) {
  const auto d = static_cast<std::uint32_t>(value);
  if (d <= 1) return {1, 0, 0};
  std::uint32_t shift = 0;
  while ((std::uint64_t{2} << shift) < d) ++shift;
  const std::uint64_t multiplier = ((std::uint64_t{1} << (32 + shift)) + d - 1) / d;
  return {d, static_cast<std::uint32_t>(multiplier), shift};
}

/// n / value, for 0 <= n < 2^31. Exact, because multiplier / 2^(32 + shift) exceeds 1 / value by
/// less than 2^-(32 + shift), and n times that is less than 1 / value.
FLASHCORE_HD constexpr std::int32_t div(std::int32_t n, const FastDivmod& by) {
  if (by.multiplier == 0) return n;
  const std::uint64_t product =
      static_cast<std::uint64_t>(static_cast<std::uint32_t>(n)) * by.multiplier;
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(product >> 32) >> by.shift);
}

struct DivmodResult {
  std::int32_t quotient;
  std::int32_t remainder;
};

FLASHCORE_HD constexpr DivmodResult divmod(std::int32_t n, const FastDivmod& by) {
  const std::int32_t quotient = div(n, by);
  return {quotient, n - quotient * static_cast<std::int32_t>(by.value)};
}

}  // namespace flashcore::core
