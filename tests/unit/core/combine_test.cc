// core/combine.h and the CPU's loop over it: joining partial results.
#include "core/combine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/combine.h"
#include "verify/inputs/random.h"

namespace flashcore::core {
namespace {

constexpr int kColumns = 70;  // more than the loop takes at once

template <typename T>
struct Part {
  std::vector<T> out = std::vector<T>(kColumns);
  T lse;
};

template <typename T>
struct Joined {
  std::vector<T> out = std::vector<T>(kColumns, T(-77));
  T lse = T(-77);
  bool operator==(const Joined& other) const {
    // Bits, not values: NOLINTNEXTLINE(bugprone-suspicious-memory-comparison)
    return std::memcmp(out.data(), other.out.data(), kColumns * sizeof(T)) == 0 &&
           std::memcmp(&lse, &other.lse, sizeof(T)) == 0;  // NOLINT(bugprone-suspicious-*)
  }
};

template <typename T>
Joined<T> join(const std::vector<Part<T>>& parts, const float* sink = nullptr) {
  Joined<T> joined;
  CombineParams p{};
  p.parts = static_cast<std::int32_t>(parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    p.table[i] = {parts[i].out.data(), &parts[i].lse, {0, 0, 0, 1}, {0, 0, 0, 0}};
  }
  p.batch = p.q_heads = p.rows = 1;
  p.v_dim = kColumns;
  p.out = joined.out.data();
  p.lse = &joined.lse;
  p.out_strides = {0, 0, 0, 1};
  p.out_element = sizeof(T) == 8 ? Element::f64 : Element::f32;
  p.sinks = sink;
  cpu::combine(p, sizeof(T) == 8 ? DType::f64 : DType::f32, 1, nullptr);
  return joined;
}

template <typename T>
class CombineTest : public testing::Test {
 public:
  static constexpr T kInfinity = std::numeric_limits<T>::infinity();
  static constexpr T kNan = std::numeric_limits<T>::quiet_NaN();
  static constexpr T kTolerance = 16 * std::numeric_limits<T>::epsilon();

  Part<T> draw(double lse) {
    Part<T> part;
    for (T& x : part.out) x = static_cast<T>(random_.normal());
    part.lse = static_cast<T>(lse);
    return part;
  }
  Part<T> empty() {
    Part<T> part = draw(0);
    std::fill(part.out.begin(), part.out.end(), kNan);  // never written, so never to be read
    part.lse = -kInfinity;
    return part;
  }

 private:
  verify::Random random_{11};
};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(CombineTest, Types);

TYPED_TEST(CombineTest, OnePartComesBackBitForBit) {
  for (const double lse : {-80.0, -0.3, 0.0, 5.5, 88.0, 700.0}) {
    const Part<TypeParam> part = this->draw(lse);
    const Joined<TypeParam> joined = join<TypeParam>({part});
    EXPECT_EQ(joined.out, part.out);
    EXPECT_EQ(joined.lse, part.lse);
  }
}

TYPED_TEST(CombineTest, EmptyPartsChangeNoBit) {
  const Part<TypeParam> a = this->draw(1.25), b = this->draw(-0.75);
  const Joined<TypeParam> both = join<TypeParam>({a, b});
  EXPECT_TRUE(join<TypeParam>({this->empty(), a, b}) == both);
  EXPECT_TRUE(join<TypeParam>({a, this->empty(), b}) == both);
  EXPECT_TRUE(join<TypeParam>({a, b, this->empty(), this->empty()}) == both);
}

TYPED_TEST(CombineTest, OnlyEmptyPartsGiveZeroAndMinusInfinity) {
  const Joined<TypeParam> joined = join<TypeParam>({this->empty(), this->empty()});
  for (const TypeParam x : joined.out) EXPECT_EQ(x, TypeParam(0));
  EXPECT_EQ(joined.lse, -this->kInfinity);
}

TYPED_TEST(CombineTest, OnlyASinkGivesZeroAndTheSink) {
  const float sink = 2.5f;
  const Joined<TypeParam> joined = join<TypeParam>({this->empty()}, &sink);
  for (const TypeParam x : joined.out) EXPECT_EQ(x, TypeParam(0));
  EXPECT_EQ(joined.lse, TypeParam(2.5));
}

TYPED_TEST(CombineTest, WeightsAreThoseOfTheDefinition) {
  const float sink = 0.5f;
  const std::vector<Part<TypeParam>> parts = {this->draw(1.5), this->draw(-2.0), this->draw(0.25)};
  for (const float* sinks : {static_cast<const float*>(nullptr), &sink}) {
    const Joined<TypeParam> joined = join<TypeParam>(parts, sinks);
    double total = sinks != nullptr ? std::exp(0.5) : 0.0;
    for (const auto& part : parts) total += std::exp(static_cast<double>(part.lse));
    EXPECT_NEAR(joined.lse, std::log(total), this->kTolerance);
    for (std::size_t c = 0; c < kColumns; ++c) {
      double want = 0;
      for (const auto& part : parts) {
        want += std::exp(static_cast<double>(part.lse)) / total * part.out[c];
      }
      ASSERT_NEAR(joined.out[c], want, 4 * this->kTolerance);
    }
  }
}

TYPED_TEST(CombineTest, FarApartPartsDoNotOverflow) {
  const Part<TypeParam> high = this->draw(3000), low = this->draw(-3000);
  const Joined<TypeParam> joined = join<TypeParam>({low, high});
  EXPECT_EQ(joined.out, high.out);
  EXPECT_EQ(joined.lse, high.lse);
}

TYPED_TEST(CombineTest, NanPropagatesFromLseAndFromOut) {
  Part<TypeParam> bad = this->draw(this->kNan);
  Joined<TypeParam> joined = join<TypeParam>({this->draw(1), bad});
  EXPECT_TRUE(std::isnan(joined.lse));
  EXPECT_TRUE(std::isnan(joined.out[0]));

  // A NaN in a part whose weight underflows to 0 is still a NaN in a key that was seen.
  bad = this->draw(-5000);
  bad.out[3] = this->kNan;
  joined = join<TypeParam>({this->draw(1), bad});
  EXPECT_TRUE(std::isnan(joined.out[3]));
  EXPECT_FALSE(std::isnan(joined.out[4]));
  EXPECT_FALSE(std::isnan(joined.lse));
}

TYPED_TEST(CombineTest, PartsAreAddedInTheOrderGiven) {
  // 1 + e + e with e below half a unit of 1: left to right the small ones are lost, the other way
  // round they are not. All lse are equal, so the weights are too.
  const TypeParam e = std::numeric_limits<TypeParam>::epsilon() * TypeParam(0.375);
  std::vector<Part<TypeParam>> parts(4);
  const TypeParam values[] = {TypeParam(1), e, e, e};
  for (std::size_t i = 0; i < 4; ++i) {
    std::fill(parts[i].out.begin(), parts[i].out.end(), values[i]);
    parts[i].lse = TypeParam(0);
  }
  const Joined<TypeParam> ascending = join(parts);
  std::reverse(parts.begin(), parts.end());
  const Joined<TypeParam> descending = join(parts);
  EXPECT_EQ(ascending.out[0], TypeParam(0.25));
  EXPECT_GT(descending.out[0], TypeParam(0.25));
}

TYPED_TEST(CombineTest, StackedPartsEqualListedOnes) {
  constexpr int kParts = 40;  // more than the table could list
  std::vector<TypeParam> outs(kParts * kColumns), lses(kParts);
  verify::Random random(5);
  for (TypeParam& x : outs) x = static_cast<TypeParam>(random.normal());
  for (TypeParam& x : lses) x = static_cast<TypeParam>(random.normal());
  lses[7] = -this->kInfinity;
  Joined<TypeParam> joined;
  CombineParams p{};
  p.stacked = true;
  p.stacked_out_stride = kColumns;
  p.stacked_lse_stride = 1;
  p.parts = kParts;
  p.table[0] = {outs.data(), lses.data(), {0, 0, 0, 1}, {0, 0, 0, 0}};
  p.batch = p.q_heads = p.rows = 1;
  p.v_dim = kColumns;
  p.out = joined.out.data();
  p.lse = &joined.lse;
  p.out_strides = {0, 0, 0, 1};
  p.out_element = sizeof(TypeParam) == 8 ? Element::f64 : Element::f32;
  cpu::combine(p, sizeof(TypeParam) == 8 ? DType::f64 : DType::f32, 3, nullptr);
  double total = 0, want = 0;
  for (std::size_t i = 0; i < kParts; ++i) total += std::exp(static_cast<double>(lses[i]));
  for (std::size_t i = 0; i < kParts; ++i) {
    want += std::exp(static_cast<double>(lses[i])) / total * outs[i * kColumns + 69];
  }
  EXPECT_NEAR(joined.out[69], want, this->kTolerance);
  EXPECT_NEAR(joined.lse, std::log(total), this->kTolerance);
}

TEST(Combine, RowsOutsideThePackedSequencesAreLeftAlone) {
  const std::int32_t cu_seqlens[] = {1, 3};
  std::vector<float> outs(4, 2.0f), lses(4, 0.0f), result(4, -1.0f);
  CombineParams p{};
  p.parts = 1;
  p.table[0] = {outs.data(), lses.data(), {0, 0, 1, 1}, {0, 0, 1, 0}};
  p.batch = p.q_heads = 1;
  p.rows = 4;
  p.v_dim = 1;
  p.cu_seqlens_q = cu_seqlens;
  p.sequences = 1;
  p.out = result.data();
  p.out_strides = {0, 0, 1, 1};
  p.out_element = Element::f32;
  cpu::combine(p, DType::f32, 1, nullptr);
  EXPECT_EQ(result, (std::vector<float>{-1, 2, 2, -1}));
}

}  // namespace
}  // namespace flashcore::core
