// core/fast_divmod.h: division by multiplication against the integer division of the CPU.
#include "core/fast_divmod.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "verify/inputs/random.h"

namespace flashcore::core {
namespace {

void expect_right(std::int32_t n, std::int32_t by) {
  const DivmodResult d = divmod(n, make_fast_divmod(by));
  ASSERT_EQ(d.quotient, n / by) << n << " / " << by;
  ASSERT_EQ(d.remainder, n % by) << n << " / " << by;
}

TEST(FastDivmod, SmallNumbersAndDivisorsAreExact) {
  for (std::int32_t by = 1; by <= 1024; ++by) {
    for (std::int32_t n = 0; n <= 4096; ++n) expect_right(n, by);
  }
}

TEST(FastDivmod, NumbersNextToMultiplesAreExact) {
  verify::Random random(1, 0);
  for (int round = 0; round < 200000; ++round) {
    // Divisors of every size, among them powers of two and their neighbors.
    const int bits = static_cast<int>(random.below(31));
    std::int64_t by = (std::int64_t{1} << bits) + random.below(3) - 1;
    if (round % 2 == 0) by = 1 + random.below(std::int64_t{1} << (bits + (bits < 30 ? 1 : 0)));
    if (by < 1) by = 1;
    if (by > INT32_MAX) by = INT32_MAX;
    const std::int64_t multiple = random.below(INT32_MAX / by + 1) * by;
    for (const std::int64_t n : {multiple - 1, multiple, multiple + 1, std::int64_t{INT32_MAX}}) {
      if (n < 0 || n > INT32_MAX) continue;
      expect_right(static_cast<std::int32_t>(n), static_cast<std::int32_t>(by));
    }
  }
}

}  // namespace
}  // namespace flashcore::core
