#include "core/row_offset.h"

#include <gtest/gtest.h>

namespace flashcore::core {
namespace {

TEST(RowOffset, MultipliesEveryIndexByItsStride) {
  constexpr Strides strides{1000, 100, 10, 1};
  EXPECT_EQ(row_offset(strides, 2, 3, 4), 2340);
  EXPECT_EQ(row_offset(strides, KvLocation{2, 4}, 3), 2340);
}

TEST(RowOffset, DoesNotOverflow32Bits) {
  constexpr Strides strides{std::int64_t{1} << 40, -(std::int64_t{1} << 33), 1 << 20, 1};
  const std::int32_t b = 3, h = 5, row = 1 << 20;
  EXPECT_EQ(row_offset(strides, b, h, row),
            3 * (std::int64_t{1} << 40) - 5 * (std::int64_t{1} << 33) + (std::int64_t{1} << 40));
}

}  // namespace
}  // namespace flashcore::core
