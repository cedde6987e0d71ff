// core/score.h: each modification, their order, and the row's addresses.
#include "core/score.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace flashcore::core {
namespace {

constexpr std::int32_t kBatch = 2, kHeads = 3, kQueries = 4, kKeys = 5;
constexpr Strides kDense{kHeads * kQueries * kKeys, kQueries* kKeys, kKeys, 1};
constexpr float kCap = 3.f, kScale = 0.5f, kScore = 1.25f;

/// A call with every option. Bias, mask and slopes differ between all elements.
struct Call {
  std::vector<float> bias, slopes;
  std::vector<std::uint8_t> mask;
  AttentionParams p{};

  Call() {
    for (int i = 0; i < kBatch * kHeads * kQueries * kKeys; ++i) {
      bias.push_back(0.25f * static_cast<float>(i) - 3.f);
      mask.push_back(i % 3 == 0 ? 0 : 1);
    }
    for (int i = 0; i < kBatch * kHeads; ++i) slopes.push_back(0.5f + static_cast<float>(i));
    p.score_scale = softcap_argument(kScale, kCap);
    p.softcap = kCap;
    p.bias = bias.data();
    p.bias_element = Element::f32;
    p.bias_strides = p.mask_strides = kDense;
    p.mask = mask.data();
    p.alibi_slopes = slopes.data();
    p.alibi_batch_stride = kHeads;
    p.alibi_head_stride = 1;
  }
};

template <ScoreInput kInput = ScoreInput::qk>
float modify(const AttentionParams& p, int b, int h, int i, int key, float distance) {
  return modify_score<ScalarScoreMath, kInput>(kScore, ScoreRow<float>{p, b, h, i}, distance, key);
}

TEST(Score, AppliesAllOptionsInOrder) {
  const Call call;
  for (int b = 0; b < kBatch; ++b) {
    for (int h = 0; h < kHeads; ++h) {
      for (int i = 0; i < kQueries; ++i) {
        for (int key = 0; key < kKeys; ++key) {
          const auto at = static_cast<std::size_t>(row_offset(kDense, b, h, i) + key);
          const double capped = kCap * std::tanh(kScale * kScore / kCap);
          const double slope = call.slopes[static_cast<std::size_t>(b * kHeads + h)];
          const double want = call.mask[at] == 0 ? -std::numeric_limits<double>::infinity()
                                                 : capped - slope * 2 + call.bias[at];
          const double got = modify(call.p, b, h, i, key, -2.f);
          if (std::isinf(want)) {
            ASSERT_EQ(got, want);
          } else {
            ASSERT_NEAR(got, want, 1e-5);
          }
        }
      }
    }
  }
}

TEST(Score, WithoutOptionsOnlyScales) {
  AttentionParams p{};
  p.score_scale = kScale;
  EXPECT_EQ(modify(p, 0, 0, 0, 0, 7.f), kScale * kScore);
  EXPECT_EQ(modify<ScoreInput::scaled>(p, 0, 0, 0, 0, 7.f), kScore);
}

TEST(Score, AppliesEachOptionAlone) {
  const Call call;
  const auto with = [&](auto select) {
    AttentionParams p{};
    p.score_scale = 1;
    select(p);
    return modify(p, 1, 2, 3, 4, -2.f);
  };
  const auto last = static_cast<std::size_t>(row_offset(kDense, 1, 2, 3) + 4);
  EXPECT_EQ(with([&](AttentionParams& p) {
              p.bias = call.p.bias;
              p.bias_element = Element::f32;
              p.bias_strides = kDense;
            }),
            kScore + call.bias[last]);
  EXPECT_EQ(with([&](AttentionParams& p) {
              p.alibi_slopes = call.p.alibi_slopes;
              p.alibi_batch_stride = kHeads;
              p.alibi_head_stride = 1;
            }),
            kScore - 2.f * call.slopes[1 * kHeads + 2]);
  EXPECT_EQ(with([&](AttentionParams& p) {
              p.mask = call.p.mask;
              p.mask_strides = kDense;
            }),
            call.mask[last] == 0 ? -std::numeric_limits<float>::infinity() : kScore);
  EXPECT_EQ(with([&](AttentionParams& p) { p.softcap = kCap; }), capped(kScore, kCap));
}

TEST(Score, ModifyScoresEqualsModifyScore) {
  const Call call;
  const auto row = ScoreRow<double>{call.p, 1, 1, 2};
  double scores[kKeys];
  for (int key = 0; key < kKeys; ++key) scores[key] = 0.1 * key;
  modify_scores<ScalarScoreMath, ScoreInput::qk>(row, [&](auto change) {
    for (std::int32_t key = 0; key < kKeys; ++key) change(scores[key], key, 3.0 - key);
  });
  for (int key = 0; key < kKeys; ++key) {
    const double one =
        modify_score<ScalarScoreMath, ScoreInput::qk>(0.1 * key, row, 3.0 - key, key);
    EXPECT_EQ(scores[key], one);
  }
}

template <int kTerms>
double worst_error(const CapPolynomial<kTerms>& polynomial, double cap) {
  const CapPolynomial<kTerms> capped = polynomial.scaled(cap, 1);
  double worst = 0;
  for (int i = -100000; i <= 100000; ++i) {
    const float argument = polynomial.up_to / 100000 * static_cast<float>(i);
    const double want = cap * std::tanh(argument * (kLn2 / 2));
    worst = std::max(worst, std::abs(capped(argument) - want));
  }
  EXPECT_TRUE(std::isnan(capped(std::numeric_limits<float>::quiet_NaN())));
  return worst;
}

TEST(Softcap, PolynomialsAreCloseToTanh) {
  for (const double cap : {1.0, 0.01, 30.0, 50.0, 256.0}) {
    EXPECT_LT(worst_error(kShortestCapPolynomial, cap), 0x1p-23 * cap);
    EXPECT_LT(worst_error(kShortCapPolynomial, cap), 0x1p-23 * cap);
    EXPECT_LT(worst_error(kCapPolynomial, cap), 0x1p-23 * cap);
  }
}

struct ConstantMath {
  template <typename Each>
  static void softcap(float, Each each) {
    each([](float) { return 100.f; });
  }
  static float absolute(float) { return 10.f; }
};

TEST(Score, UsesTheMathPolicy) {
  Call call;
  call.p.bias = nullptr;
  call.p.mask = nullptr;
  const auto row = ScoreRow<float>{call.p, 0, 0, 0};
  EXPECT_EQ((modify_score<ConstantMath, ScoreInput::qk>(kScore, row, 1.f, 0)),
            100.f - call.slopes[0] * 10.f);
}

}  // namespace
}  // namespace flashcore::core
