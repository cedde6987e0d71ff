// core/dequant_f16.h: every value of every 8-bit format as f16, at every byte of a register, and
// the order in which the tensor cores read the values.
#include "core/dequant_f16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/mma_layout.h"

namespace flashcore::core {
namespace {

float value_of(std::uint32_t word, int place) {
  return float_of_f16(static_cast<std::uint16_t>(word >> (16 * place)));
}

/// Tests each 8-bit value at each of the four bytes, with several values of the other bytes.
template <Element kReader>
void expect_exact(Element format) {
  const Dequantizer<kReader> read(format);
  const float unit = code_unit(format);
  for (std::uint32_t bits = 0; bits < 256; ++bits) {
    for (const std::uint32_t others : {0x00000000u, 0xffffffffu, 0x7f7f7f7fu, 0x80808080u}) {
      for (int place = 0; place < 4; ++place) {
        const std::uint32_t word = (others & ~(0xffu << (8 * place))) | bits << (8 * place);
        const F16x2Pair pairs = read(word);
        const float got = value_of(place % 2 == 0 ? pairs.even : pairs.odd, place / 2) * unit;
        const float want = decode(format, static_cast<std::uint8_t>(bits));
        ASSERT_TRUE(std::isnan(want) ? std::isnan(got) : got == want)
            << "format " << static_cast<int>(format) << " bits " << bits << " place " << place
            << " got " << got << " want " << want;
        if (!std::isnan(want) && has_nan(format)) {
          ASSERT_EQ(std::signbit(got), std::signbit(want)) << bits;  // also for zeros
        }
      }
    }
  }
}

TEST(F16x2Pair, EveryValueIsExact) {
  expect_exact<Element::e4m3>(Element::e4m3);
  expect_exact<Element::e5m2>(Element::e5m2);
  expect_exact<Element::int8>(Element::int8);
  expect_exact<Element::int8>(Element::u8);
}

TEST(F16x2Pair, ZeroDecodesToZero) {
  for (const Element format : {Element::e4m3, Element::e5m2, Element::int8, Element::u8}) {
    EXPECT_EQ(decode(format, static_cast<std::uint8_t>(zero_codes(format))), 0.f);
    EXPECT_EQ(zero_codes(format) % 256 * 0x01010101u, zero_codes(format));
  }
}

// ldmatrix_x4() of 8 rows × 16 bytes loads four bytes of row lane / 4 into a lane. Element k of the
// B operand of one k-step is byte even_odd_index(k) of that row.
TEST(F16x2Pair, KChunkIsTheOperandOfOneStep) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int reg = 0; reg < 2; ++reg) {
      for (int half = 0; half < 2; ++half) {
        const int byte = 2 * half + reg;  // even bytes go to register 0, odd bytes to register 1
        const Coordinate b = mma_b(lane, reg, half);
        EXPECT_EQ(b.column, lane / 4);
        EXPECT_EQ(even_odd_index(b.row), 4 * (lane % 4) + byte);
      }
    }
  }
}

// ldmatrix_x4_trans() loads bytes 2 g and 2 g + 1 (g = lane / 4) of rows 2 t and 2 t + 1
// (t = lane % 4) into a lane, the two bytes of a row next to each other. The even bytes are the B
// operand of the n-tile whose column n is byte even_odd_index(n). The odd bytes are the B operand
// of the next n-tile.
TEST(F16x2Pair, VChunkIsTheOperandOfTwoTiles) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int tile = 0; tile < 2; ++tile) {
      for (int half = 0; half < 2; ++half) {
        const int byte = 2 * half + tile;
        const int row = 2 * (lane % 4) + byte / 2, column = 2 * (lane / 4) + byte % 2;
        const Coordinate b = mma_b(lane, 0, half);
        EXPECT_EQ(b.row, row);
        EXPECT_EQ(even_odd_index(8 * tile + b.column), column);
      }
    }
  }
}

// The accumulators of a thread for two such n-tiles are four adjacent columns.
TEST(F16x2Pair, AccumulatorsOfTwoTilesAreAdjacentColumns) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int reg = 0; reg < 2; ++reg) {
      for (int tile = 0; tile < 2; ++tile) {
        EXPECT_EQ(even_odd_index(8 * tile + mma_c(lane, reg).column),
                  4 * (lane % 4) + 2 * reg + tile);
      }
    }
  }
}

TEST(F16x2Pair, PowerOfTwoNearIsClamped) {
  EXPECT_EQ(power_of_two_near(1.f), 1.f);
  EXPECT_EQ(power_of_two_near(1.99f), 1.f);
  EXPECT_EQ(power_of_two_near(3e-5f), 0x1p-16f);
  for (const float value : {0.f, 1e-42f, 0x1p-126f}) EXPECT_EQ(power_of_two_near(value), 0x1p-126f);
  for (const float value :
       {3e38f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_EQ(power_of_two_near(value), 0x1p126f);
  }
}

}  // namespace
}  // namespace flashcore::core
