// Scores, biases, sinks and softcaps near the largest finite number.
#include <cmath>
#include <limits>

#include "support/kernel_test.h"

namespace flashcore::test {
namespace {

class Extremes : public KernelTest {
 protected:
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  static constexpr std::int64_t kKeys = 150;

  Inputs inputs() {
    return draw_inputs(random(), kernel(),
                       {.batch = 2,
                        .q_heads = 4,
                        .kv_heads = 2,
                        .q_len = 9,
                        .kv_len = kKeys,
                        .head_dim = 16,
                        .v_dim = 24});
  }

  /// The types of a bias, with their largest numbers.
  std::vector<std::pair<DType, double>> biases() const {
    std::vector<std::pair<DType, double>> all = {{DType::f32, std::numeric_limits<float>::max()}};
    if (dtype() == DType::bf16) all.emplace_back(DType::bf16, std::ldexp(255.0, 120));
    if (dtype() == DType::f16) all.emplace_back(DType::f16, 65504.0);
    if (dtype() == DType::f64) all.emplace_back(DType::f64, std::numeric_limits<double>::max());
    return all;
  }

  static Tensor bias_of(DType type, const auto& value) {
    Tensor bias(type, {1, 1, 1, kKeys});
    for (std::int64_t key = 0; key < kKeys; ++key) bias.set({0, 0, 0, key}, value(key));
    return bias;
  }
};
FLASHCORE_FOR_EACH_KERNEL(Extremes);

TEST_P(Extremes, LowestBiasInAllKeysGivesTheMeanOfV) {
  for (const auto& [type, largest] : biases()) {
    if (type == DType::f16) continue;  // 65504 does not absorb the scores
    Inputs all = inputs();
    all.options.num_splits = 1;
    Inputs mean = all;
    all.bias = bias_of(type, [lowest = -largest](std::int64_t) { return lowest; });
    mean.options.scale = 0.0;
    const Output got = attend(all), want = attend(mean);
    FLASHCORE_EXPECT_SAME_BITS(got.out, want.out);
    for (const double lse : got.lse.values()) EXPECT_EQ(lse, -largest);
    // An LSE of this size loses log(keys) to rounding, so all splits get the same weight.
    all.options.num_splits = 3;
    all.v.fill(0.75);
    for (const double x : attend(all).out.values()) EXPECT_NEAR(x, 0.75, 1e-6);
  }
}

TEST_P(Extremes, LowestBiasHidesItsKey) {
  for (const auto& [type, largest] : biases()) {
    for (const std::int32_t splits : {1, 3}) {
      Inputs low = inputs();
      low.options.num_splits = splits;
      Inputs hidden = low;
      const auto with = [](double value) {
        return [value](std::int64_t key) { return key % 3 == 1 ? value : 0.5; };
      };
      low.bias = bias_of(type, with(-largest));
      hidden.bias = bias_of(type, with(-kInfinity));
      FLASHCORE_EXPECT_SAME(attend(low), attend(hidden));
    }
  }
}

TEST_P(Extremes, LargestBiasSelectsItsKey) {
  for (const auto& [type, largest] : biases()) {
    for (const std::int32_t splits : {1, 3}) {
      Inputs high = inputs();
      high.options.num_splits = splits;
      high.bias = bias_of(type, [top = largest](std::int64_t key) { return key == 77 ? top : 0; });
      const Output output = attend(high);
      for (std::int64_t h = 0; h < 4; ++h) {
        for (std::int64_t c = 0; c < 24; ++c) {
          EXPECT_EQ(output.out.at({1, h, 3, c}), high.v.at({1, h / 2, 77, c}));
        }
      }
    }
  }
}

TEST_P(Extremes, ScoresNearTheLargestNumberAreRight) {
  if (dtype() == DType::f16) return;  // q and k overflow
  const double size = dtype() == DType::f64 ? 1e154 : 0x1p64;
  for (const double sign : {1.0, -1.0}) {
    Inputs large = draw_inputs(random(), kernel(),
                               {.batch = 1,
                                .q_heads = 1,
                                .kv_heads = 1,
                                .q_len = 3,
                                .kv_len = kKeys,
                                .head_dim = 1,
                                .v_dim = 5});
    large.options.scale = 0.9;  // 0.9 * 2^128 = 3.1e38
    large.q.fill(size);
    large.k.fill(0);
    for (const std::int64_t key : {20, 90}) large.k.set({0, 0, key, 0}, sign * size);
    const Output output = attend(large);
    ASSERT_TRUE(output.status.ok()) << output.status.message();
    const double lse = output.lse.at({0, 0, 1});
    if (sign > 0) {
      EXPECT_NEAR(lse / (0.9 * size * size), 1.0, 1e-6);
      for (std::int64_t c = 0; c < 5; ++c) {
        const double mean = (large.v.at({0, 0, 20, c}) + large.v.at({0, 0, 90, c})) / 2;
        EXPECT_NEAR(output.out.at({0, 0, 1, c}), mean, 0.01 * std::fabs(mean) + 1e-3);
      }
    } else {
      EXPECT_NEAR(lse, std::log(kKeys - 2.0), 1e-5);
    }
  }
}

TEST_P(Extremes, LargestSinksTakeAllOrNothing) {
  const double largest = std::numeric_limits<float>::max();
  for (const std::int32_t splits : {1, 3}) {
    Inputs with = inputs();
    with.options.num_splits = splits;
    Inputs without = with;
    with.sinks = Tensor(DType::f32, {4});
    with.sinks.fill(largest);
    const Output all_sink = attend(with);
    for (const double x : all_sink.out.values()) ASSERT_EQ(x, 0.0);
    for (const double lse : all_sink.lse.values()) ASSERT_EQ(lse, largest);
    with.sinks.fill(-largest);
    FLASHCORE_EXPECT_SAME(attend(with), attend(without));
  }
}

TEST_P(Extremes, EverySoftcapIsRight) {
  for (const double cap : {0.01, 255.0, 257.0, 1e3, 1e4, 1e6, 1e8, 1e15, 1e30, 1e39, 1e300}) {
    for (const double sigma : {1.0, 10.0}) {
      Inputs capped = draw_inputs(random(), kernel(), draw_sizes(random(), kernel()), sigma);
      capped.options.softcap = cap;
      EXPECT_EQ(verdict(capped, attend(capped)), "") << "softcap " << cap << ", sigma " << sigma;
    }
  }
}

}  // namespace
}  // namespace flashcore::test
