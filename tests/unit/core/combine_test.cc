// core/combine.h and the CPU loop over it: combination of partial results.
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

constexpr int kColumns = 70;  // more than one step of the loop

template <typename T>
struct Partial {
  std::vector<T> out = std::vector<T>(kColumns);
  T lse;
};

template <typename T>
struct Combined {
  std::vector<T> out = std::vector<T>(kColumns, T(-77));
  T lse = T(-77);
  bool operator==(const Combined& other) const {
    // Bits, not values: NOLINTNEXTLINE(bugprone-suspicious-memory-comparison)
    return std::memcmp(out.data(), other.out.data(), kColumns * sizeof(T)) == 0 &&
           std::memcmp(&lse, &other.lse, sizeof(T)) == 0;  // NOLINT(bugprone-suspicious-*)
  }
};

template <typename T>
Combined<T> combine_partials(const std::vector<Partial<T>>& partials, const float* sink = nullptr) {
  Combined<T> combined;
  CombineParams p{};
  p.parts = static_cast<std::int32_t>(partials.size());
  for (std::size_t i = 0; i < partials.size(); ++i) {
    p.table[i] = {partials[i].out.data(), &partials[i].lse, {0, 0, 0, 1}, {0, 0, 0, 0}};
  }
  p.batch = p.q_heads = p.rows = 1;
  p.v_dim = kColumns;
  p.out = combined.out.data();
  p.lse = &combined.lse;
  p.out_strides = {0, 0, 0, 1};
  p.out_element = sizeof(T) == 8 ? Element::f64 : Element::f32;
  p.sinks = sink;
  cpu::combine(p, sizeof(T) == 8 ? DType::f64 : DType::f32, 1, nullptr);
  return combined;
}

template <typename T>
class CombineTest : public testing::Test {
 public:
  static constexpr T kInfinity = std::numeric_limits<T>::infinity();
  static constexpr T kNan = std::numeric_limits<T>::quiet_NaN();
  static constexpr T kTolerance = 16 * std::numeric_limits<T>::epsilon();

  Partial<T> draw(double lse) {
    Partial<T> partial;
    for (T& x : partial.out) x = static_cast<T>(random_.normal());
    partial.lse = static_cast<T>(lse);
    return partial;
  }
  Partial<T> empty() {
    Partial<T> partial = draw(0);
    std::fill(partial.out.begin(), partial.out.end(), kNan);  // must not be read
    partial.lse = -kInfinity;
    return partial;
  }

 private:
  verify::Random random_{11};
};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(CombineTest, Types);

TYPED_TEST(CombineTest, OnePartialIsReturnedBitForBit) {
  for (const double lse : {-80.0, -0.3, 0.0, 5.5, 88.0, 700.0}) {
    const Partial<TypeParam> partial = this->draw(lse);
    const Combined<TypeParam> combined = combine_partials<TypeParam>({partial});
    EXPECT_EQ(combined.out, partial.out);
    EXPECT_EQ(combined.lse, partial.lse);
  }
}

TYPED_TEST(CombineTest, EmptyPartialsChangeNoBit) {
  const Partial<TypeParam> a = this->draw(1.25), b = this->draw(-0.75);
  const Combined<TypeParam> both = combine_partials<TypeParam>({a, b});
  EXPECT_TRUE(combine_partials<TypeParam>({this->empty(), a, b}) == both);
  EXPECT_TRUE(combine_partials<TypeParam>({a, this->empty(), b}) == both);
  EXPECT_TRUE(combine_partials<TypeParam>({a, b, this->empty(), this->empty()}) == both);
}

TYPED_TEST(CombineTest, OnlyEmptyPartialsGiveZeroAndMinusInfinity) {
  const Combined<TypeParam> combined = combine_partials<TypeParam>({this->empty(), this->empty()});
  for (const TypeParam x : combined.out) EXPECT_EQ(x, TypeParam(0));
  EXPECT_EQ(combined.lse, -this->kInfinity);
}

TYPED_TEST(CombineTest, SinkAloneGivesZeroAndTheSink) {
  const float sink = 2.5f;
  const Combined<TypeParam> combined = combine_partials<TypeParam>({this->empty()}, &sink);
  for (const TypeParam x : combined.out) EXPECT_EQ(x, TypeParam(0));
  EXPECT_EQ(combined.lse, TypeParam(2.5));
}

TYPED_TEST(CombineTest, WeightsMatchTheDefinition) {
  const float sink = 0.5f;
  const std::vector<Partial<TypeParam>> partials = {this->draw(1.5), this->draw(-2.0),
                                                    this->draw(0.25)};
  for (const float* sinks : {static_cast<const float*>(nullptr), &sink}) {
    const Combined<TypeParam> combined = combine_partials<TypeParam>(partials, sinks);
    double total = sinks != nullptr ? std::exp(0.5) : 0.0;
    for (const auto& partial : partials) total += std::exp(static_cast<double>(partial.lse));
    EXPECT_NEAR(combined.lse, std::log(total), this->kTolerance);
    for (std::size_t c = 0; c < kColumns; ++c) {
      double want = 0;
      for (const auto& partial : partials) {
        want += std::exp(static_cast<double>(partial.lse)) / total * partial.out[c];
      }
      ASSERT_NEAR(combined.out[c], want, 4 * this->kTolerance);
    }
  }
}

TYPED_TEST(CombineTest, DistantLsesDoNotOverflow) {
  const Partial<TypeParam> high = this->draw(3000), low = this->draw(-3000);
  const Combined<TypeParam> combined = combine_partials<TypeParam>({low, high});
  EXPECT_EQ(combined.out, high.out);
  EXPECT_EQ(combined.lse, high.lse);
}

TYPED_TEST(CombineTest, NanPropagatesFromLseAndFromOut) {
  Partial<TypeParam> bad = this->draw(this->kNan);
  Combined<TypeParam> combined = combine_partials<TypeParam>({this->draw(1), bad});
  EXPECT_TRUE(std::isnan(combined.lse));
  EXPECT_TRUE(std::isnan(combined.out[0]));

  // A NaN in a partial result whose weight underflows to 0 still comes from a visible key.
  bad = this->draw(-5000);
  bad.out[3] = this->kNan;
  combined = combine_partials<TypeParam>({this->draw(1), bad});
  EXPECT_TRUE(std::isnan(combined.out[3]));
  EXPECT_FALSE(std::isnan(combined.out[4]));
  EXPECT_FALSE(std::isnan(combined.lse));
}

TYPED_TEST(CombineTest, PartialsAreAddedInOrder) {
  // e is less than half an ulp of 1. The sum 1 + e + e + e from left to right loses every e, the
  // sum from right to left does not. All lse are equal, so all weights are equal.
  const TypeParam e = std::numeric_limits<TypeParam>::epsilon() * TypeParam(0.375);
  std::vector<Partial<TypeParam>> partials(4);
  const TypeParam values[] = {TypeParam(1), e, e, e};
  for (std::size_t i = 0; i < 4; ++i) {
    std::fill(partials[i].out.begin(), partials[i].out.end(), values[i]);
    partials[i].lse = TypeParam(0);
  }
  const Combined<TypeParam> ascending = combine_partials(partials);
  std::reverse(partials.begin(), partials.end());
  const Combined<TypeParam> descending = combine_partials(partials);
  EXPECT_EQ(ascending.out[0], TypeParam(0.25));
  EXPECT_GT(descending.out[0], TypeParam(0.25));
}

TYPED_TEST(CombineTest, StackedPartialsMatchTheDefinition) {
  constexpr int kPartials = 40;  // more than the table can list
  std::vector<TypeParam> outs(kPartials * kColumns), lses(kPartials);
  verify::Random random(5);
  for (TypeParam& x : outs) x = static_cast<TypeParam>(random.normal());
  for (TypeParam& x : lses) x = static_cast<TypeParam>(random.normal());
  lses[7] = -this->kInfinity;
  Combined<TypeParam> combined;
  CombineParams p{};
  p.stacked = true;
  p.stacked_out_stride = kColumns;
  p.stacked_lse_stride = 1;
  p.parts = kPartials;
  p.table[0] = {outs.data(), lses.data(), {0, 0, 0, 1}, {0, 0, 0, 0}};
  p.batch = p.q_heads = p.rows = 1;
  p.v_dim = kColumns;
  p.out = combined.out.data();
  p.lse = &combined.lse;
  p.out_strides = {0, 0, 0, 1};
  p.out_element = sizeof(TypeParam) == 8 ? Element::f64 : Element::f32;
  cpu::combine(p, sizeof(TypeParam) == 8 ? DType::f64 : DType::f32, 3, nullptr);
  double total = 0, want = 0;
  for (std::size_t i = 0; i < kPartials; ++i) total += std::exp(static_cast<double>(lses[i]));
  for (std::size_t i = 0; i < kPartials; ++i) {
    want += std::exp(static_cast<double>(lses[i])) / total * outs[i * kColumns + 69];
  }
  EXPECT_NEAR(combined.out[69], want, this->kTolerance);
  EXPECT_NEAR(combined.lse, std::log(total), this->kTolerance);
}

TEST(Combine, RowsOutsideVarlenSequencesAreNotWritten) {
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
