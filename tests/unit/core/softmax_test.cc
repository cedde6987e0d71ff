// core/softmax.h: online softmax, and its edge cases.
#include "core/softmax.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "verify/inputs/random.h"

namespace flashcore::core {
namespace {

constexpr Sink kNoSink{};

template <typename T>
class SoftmaxStateTest : public testing::Test {
 public:
  static constexpr T kInfinity = std::numeric_limits<T>::infinity();
  static constexpr T kNan = std::numeric_limits<T>::quiet_NaN();
  static constexpr T kTolerance = 64 * std::numeric_limits<T>::epsilon();
};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(SoftmaxStateTest, Types);

TYPED_TEST(SoftmaxStateTest, BaseIsTheMaximumOrZero) {
  EXPECT_EQ(softmax_base<TypeParam>(TypeParam(-3.5)), TypeParam(-3.5));
  EXPECT_EQ(softmax_base<TypeParam>(-this->kInfinity), TypeParam(0));
  EXPECT_EQ(softmax_base<TypeParam>(this->kInfinity), this->kInfinity);
}

TYPED_TEST(SoftmaxStateTest, RowWithoutKeysIsZeroAndMinusInfinity) {
  const SoftmaxState<TypeParam> none{-this->kInfinity, TypeParam(0)};
  EXPECT_EQ(output_factor(none.sum), TypeParam(0));
  EXPECT_EQ(log_sum_exp(none), -this->kInfinity);
}

TYPED_TEST(SoftmaxStateTest, NanSumReachesFactorAndLse) {
  const SoftmaxState<TypeParam> bad{TypeParam(1), this->kNan};
  EXPECT_TRUE(std::isnan(output_factor(bad.sum)));
  EXPECT_TRUE(std::isnan(log_sum_exp(bad)));
}

TYPED_TEST(SoftmaxStateTest, LogSumExpIsNatural) {
  // exp(2) * 2.5.
  const SoftmaxState<TypeParam> state{TypeParam(2), TypeParam(2.5)};
  EXPECT_NEAR(log_sum_exp(state), 2 + std::log(2.5), this->kTolerance);
}

TYPED_TEST(SoftmaxStateTest, SinkAloneIsTheLse) {
  SoftmaxState<TypeParam> state{-this->kInfinity, TypeParam(0)};
  const TypeParam rescale = add_sink(state, TypeParam(3));
  EXPECT_EQ(rescale, TypeParam(0));
  EXPECT_EQ(state.max, TypeParam(3));
  EXPECT_EQ(state.sum, TypeParam(1));
  EXPECT_NEAR(log_sum_exp(state), 3.0, this->kTolerance);
}

TYPED_TEST(SoftmaxStateTest, SinkOfMinusInfinityChangesNoBit) {
  SoftmaxState<TypeParam> state{TypeParam(-7.25), TypeParam(1.7)};
  EXPECT_EQ(add_sink(state, -this->kInfinity), TypeParam(1));
  EXPECT_EQ(state.max, TypeParam(-7.25));
  EXPECT_EQ(state.sum, TypeParam(1.7));

  SoftmaxState<TypeParam> none{-this->kInfinity, TypeParam(0)};
  const TypeParam rescale = add_sink(none, -this->kInfinity);
  EXPECT_FALSE(std::isnan(rescale));
  EXPECT_EQ(none.max, -this->kInfinity);
  EXPECT_EQ(none.sum, TypeParam(0));
}

TYPED_TEST(SoftmaxStateTest, SinkAddsToTheDenominatorOnly) {
  verify::Random random(3);
  for (int n = 0; n < 1000; ++n) {
    const double max = 20 * random.normal(), sum = 1 + random.uniform(),
                 sink = 20 * random.normal();
    SoftmaxState<TypeParam> state{static_cast<TypeParam>(max), static_cast<TypeParam>(sum)};
    const double before = std::exp(static_cast<double>(state.max)) * state.sum;
    const auto rounded_sink = static_cast<TypeParam>(sink);
    const TypeParam rescale = add_sink(state, rounded_sink);
    const double want = before + std::exp(static_cast<double>(rounded_sink));
    const double got = std::exp(static_cast<double>(state.max)) * state.sum;
    ASSERT_NEAR(got / want, 1.0, this->kTolerance);
    // `rescale` converts accumulators from the old maximum to the new one.
    ASSERT_NEAR(rescale, std::exp(static_cast<double>(static_cast<TypeParam>(max)) - state.max),
                this->kTolerance);
    ASSERT_GE(state.max, rounded_sink);
  }
}

TYPED_TEST(SoftmaxStateTest, LargestNumbersDoNotOverflow) {
  const TypeParam largest = std::numeric_limits<TypeParam>::max();
  SoftmaxState<TypeParam> low{-largest, TypeParam(4)};
  EXPECT_EQ(log_sum_exp(low), -largest);
  EXPECT_EQ(add_sink(low, -largest), TypeParam(1));
  EXPECT_EQ(low.sum, TypeParam(5));
  EXPECT_EQ(add_sink(low, largest), TypeParam(0));
  EXPECT_EQ(low.sum, TypeParam(1));
  EXPECT_EQ(log_sum_exp(low), largest);
}

TYPED_TEST(SoftmaxStateTest, NanSinkMakesTheRowNan) {
  SoftmaxState<TypeParam> state{TypeParam(1), TypeParam(1)};
  static_cast<void>(add_sink(state, this->kNan));
  EXPECT_TRUE(std::isnan(state.sum));
}

TYPED_TEST(SoftmaxStateTest, WeightIsOneForEqualMaxima) {
  for (const TypeParam max : {TypeParam(-80), TypeParam(0.3), TypeParam(700)}) {
    EXPECT_EQ(partial_weight(max, max), TypeParam(1));
    EXPECT_EQ(partial_weight(-this->kInfinity, max), TypeParam(0));
    EXPECT_NEAR(partial_weight(max - TypeParam(2), max), std::exp(-2.0), this->kTolerance);
  }
  EXPECT_EQ(partial_weight(-this->kInfinity, -this->kInfinity), TypeParam(0));
}

TYPED_TEST(SoftmaxStateTest, FinalRowHasFactorAndLse) {
  const SoftmaxState<TypeParam> state{TypeParam(2), TypeParam(2.5)};
  const FinalRow<TypeParam> without_sink = finalize_row(state, kNoSink, Fault{});
  EXPECT_EQ(without_sink.factor, TypeParam(1) / TypeParam(2.5));
  EXPECT_EQ(without_sink.lse(Fault{}), log_sum_exp(state));

  const float sink = 3;
  const FinalRow<TypeParam> with_sink = finalize_row(state, Sink{true, &sink, 0, 1}, Fault{});
  const double total = 2.5 * std::exp(2.0) + std::exp(3.0);
  EXPECT_NEAR(with_sink.factor, std::exp(2.0) / total, this->kTolerance);
  EXPECT_NEAR(with_sink.lse(Fault{}), std::log(total), this->kTolerance);
}

TYPED_TEST(SoftmaxStateTest, FinalRowWithoutKeysIsZero) {
  const SoftmaxState<TypeParam> none{-this->kInfinity, TypeParam(0)};
  EXPECT_EQ(finalize_row(none, kNoSink, Fault{}).factor, TypeParam(0));
  EXPECT_EQ(finalize_row(none, kNoSink, Fault{}).lse(Fault{}), -this->kInfinity);
  const float sink = 1.5f;
  EXPECT_EQ(finalize_row(none, Sink{true, &sink, 0, 1}, Fault{}).factor, TypeParam(0));
  EXPECT_EQ(finalize_row(none, Sink{true, &sink, 0, 1}, Fault{}).lse(Fault{}), TypeParam(1.5));
}

struct HalvingMath : AccurateMath {
  template <typename T>
  static T exp(T x) {
    return x / 2;
  }
  template <typename T>
  static T output_factor(T sum) {
    return sum / 2;
  }
};

TYPED_TEST(SoftmaxStateTest, UsesTheMathPolicy) {
  EXPECT_EQ(partial_weight<HalvingMath>(TypeParam(5), TypeParam(3)), TypeParam(1));
  const SoftmaxState<TypeParam> state{TypeParam(2), TypeParam(8)};
  EXPECT_EQ(finalize_row<HalvingMath>(state, kNoSink, Fault{}).factor, TypeParam(4));
}

TYPED_TEST(SoftmaxStateTest, TileSumsAddWithOneRescale) {
  EXPECT_EQ(add_tile_sum(TypeParam(2), TypeParam(0.5), TypeParam(3)), TypeParam(4));
  EXPECT_EQ(add_tile_sum(TypeParam(0), TypeParam(0), TypeParam(3)), TypeParam(3));
}

}  // namespace
}  // namespace flashcore::core
