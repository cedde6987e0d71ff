#include "plan/divide.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>

namespace flashcore {
namespace {

// Operands on both sides of the limit of 32-bit division.
TEST(Divide, EqualsDivisionIn64Bits) {
  constexpr std::int64_t k32 = std::int64_t{1} << 32, kMost = INT64_MAX / 2;
  for (const std::int64_t a : {std::int64_t{0}, std::int64_t{1}, std::int64_t{4095}, k32 - 1, k32,
                               k32 + 1, 3 * k32 + 5, kMost}) {
    for (const std::int64_t b :
         {std::int64_t{1}, std::int64_t{3}, std::int64_t{256}, k32 - 1, k32, k32 + 7, kMost}) {
      EXPECT_EQ(divide(a, b), a / b) << a << " / " << b;
      EXPECT_EQ(ceil_div(a, b), a / b + (a % b != 0)) << a << " / " << b;
    }
  }
}

}  // namespace
}  // namespace flashcore
