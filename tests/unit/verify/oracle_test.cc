// The oracle against hand-computed values and against the definition in long double.
#include "reference/oracle.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/draw.h"
#include "unit/verify/naive.h"

namespace flashcore::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

reference::Oracle oracle_of(const Inputs& inputs, int threads = 1) {
  const Output output = make_output(inputs);
  const Tensors tensors = tensors_of(inputs, output.out, output.lse);
  const Result<Problem> problem = make_problem(tensors, inputs.options);
  EXPECT_TRUE(problem.ok()) << problem.status().message();
  return reference::compute(*problem, tensors, reference::all_rows(*problem, tensors), true,
                            threads);
}

/// One query, and keys with scores log 1, log 2 and log 3 and values 6, 12 and 18.
Inputs three_keys() {
  Inputs in;
  in.q = tensor_of(DType::f64, {1, 1, 1, 1}, {1.0});
  in.k = tensor_of(DType::f64, {1, 1, 3, 1}, {0.0, std::log(2.0), std::log(3.0)});
  in.v = tensor_of(DType::f64, {1, 1, 3, 1}, {6, 12, 18});
  in.options.scale = 1.0;
  return in;
}

TEST(OracleByHand, Softmax) {
  const reference::Oracle o = oracle_of(three_keys());
  EXPECT_NEAR(o.out[0], (6 + 24 + 54) / 6.0, 1e-14);
  EXPECT_NEAR(o.lse[0], std::log(6.0), 1e-15);
  EXPECT_NEAR(o.max[0], std::log(3.0), 1e-15);
  EXPECT_NEAR(o.sum[0], 2.0, 1e-15);
  EXPECT_NEAR(o.probabilities[0][1], 1.0 / 3, 1e-15);
  EXPECT_NEAR(o.scores[0][2], std::log(3.0), 1e-15);
  EXPECT_NEAR(o.spread[0], std::sqrt(1.0 + 16 + 81), 1e-13);
  EXPECT_NEAR(o.deviation[0], (8 * 1 + 2 * 2 + 4 * 3) / 6.0, 1e-13);
  EXPECT_NEAR(o.v_mass[0], 36 / 2.0, 1e-13);
  EXPECT_EQ(o.kv_len[0], 3);
}

TEST(OracleByHand, SinkAddsToTheDenominator) {
  Inputs in = three_keys();
  in.sinks = tensor_of(DType::f32, {1}, {std::log(6.0)});
  const double sink = in.sinks.at({0});
  reference::Oracle o = oracle_of(in);
  EXPECT_NEAR(o.out[0], 84 / (6 + std::exp(sink)), 1e-13);
  EXPECT_NEAR(o.lse[0], std::log(6 + std::exp(sink)), 1e-14);
  in.options.partial = true;  // merge() adds the sink
  o = oracle_of(in);
  EXPECT_NEAR(o.out[0], 14.0, 1e-13);
  EXPECT_NEAR(o.lse[0], std::log(6.0), 1e-14);
}

TEST(OracleByHand, OrderIsScaleSoftcapAlibiBias) {
  Inputs in = three_keys();
  in.options.scale = 2.0;
  in.options.softcap = 1.5;
  in.options.kernel = nullptr;
  in.alibi_slopes = tensor_of(DType::f32, {1}, {0.25});
  in.bias = tensor_of(DType::f32, {1, 1, 1, 3}, {0.5, -1.0, 0.0});
  const reference::Oracle o = oracle_of(in);
  // The query is at the position of the last key: the distances are 2, 1 and 0.
  EXPECT_NEAR(o.scores[0][0], 1.5 * std::tanh(0.0) - 0.5 + 0.5, 1e-15);
  EXPECT_NEAR(o.scores[0][1], 1.5 * std::tanh(2 * std::log(2.0) / 1.5) - 0.25 - 1.0, 1e-15);
  EXPECT_NEAR(o.scores[0][2], 1.5 * std::tanh(2 * std::log(3.0) / 1.5), 1e-15);
  EXPECT_NEAR(o.magnitude[0],
              std::max(2 * std::log(3.0) + 1.5, 2 * std::log(2.0) + 1.5 + 0.25 + 1.0), 1e-14);
}

TEST(OracleByHand, MasksAndRowsWithoutKeys) {
  Inputs in = three_keys();
  in.mask = tensor_of(DType::boolean, {1, 1, 1, 3}, {1, 0, 1});
  reference::Oracle o = oracle_of(in);
  EXPECT_NEAR(o.out[0], (6 + 54) / 4.0, 1e-14);
  EXPECT_NEAR(o.lse[0], std::log(4.0), 1e-15);
  EXPECT_EQ(o.scores[0][1], -kInfinity);
  EXPECT_EQ(o.probabilities[0][1], 0.0);
  in.mask = tensor_of(DType::boolean, {1, 1, 1, 3}, {0, 0, 0});
  o = oracle_of(in);
  EXPECT_EQ(o.out[0], 0.0);
  EXPECT_EQ(o.lse[0], -kInfinity);
  EXPECT_EQ(o.max[0], -kInfinity);
  EXPECT_EQ(o.sum[0], 0.0);
  in.mask = {};
  in.options.causal = true;
  in.q_start = ints({1});
  EXPECT_NEAR(oracle_of(in).lse[0], std::log(3.0), 1e-15);
  in.options.window_left = 0;
  EXPECT_NEAR(oracle_of(in).lse[0], std::log(2.0), 1e-15);
  in.k_start = ints({2});
  EXPECT_EQ(oracle_of(in).lse[0], -kInfinity);
}

TEST(OracleByHand, NanReachesTheRowsThatSeeIt) {
  Inputs in = three_keys();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  in.v.set({0, 0, 1, 0}, nan);
  EXPECT_TRUE(std::isnan(oracle_of(in).out[0]));
  EXPECT_FALSE(std::isnan(oracle_of(in).lse[0]));
  in.mask = tensor_of(DType::boolean, {1, 1, 1, 3}, {1, 0, 1});
  EXPECT_FALSE(std::isnan(oracle_of(in).out[0]));
  EXPECT_EQ(oracle_of(in).may_be_poisoned[0], 1);
  in = three_keys();
  EXPECT_EQ(oracle_of(in).may_be_poisoned[0], 0);
  in.k.set({0, 0, 0, 0}, nan);
  EXPECT_TRUE(std::isnan(oracle_of(in).out[0]));
  EXPECT_TRUE(std::isnan(oracle_of(in).lse[0]));
}

void expect_close(double got, long double want, double scale, const char* what) {
  if (!std::isfinite(want)) {
    ASSERT_EQ(got, static_cast<double>(want)) << what;
    return;
  }
  ASSERT_NEAR(got, static_cast<double>(want),
              2e-14 * (scale + std::fabs(static_cast<double>(want))))
      << what;
}

void expect_same_as_naive(const Inputs& inputs) {
  const reference::Oracle o = oracle_of(inputs);
  const std::int64_t v_dim = inputs.v.shape().back();
  for (std::size_t r = 0; r < o.rows.size(); ++r) {
    const NaiveRow want = naive_row(inputs, o.rows[r].b, o.rows[r].h, o.rows[r].i);
    const double m = 1 + static_cast<double>(want.magnitude);
    ASSERT_EQ(o.scores[r].size(), want.score.size());
    for (std::size_t j = 0; j < want.score.size(); ++j) {
      expect_close(o.scores[r][j], want.score[j], m, "score");
      expect_close(o.probabilities[r][j], want.probability[j], m, "probability");
    }
    expect_close(o.lse[r], want.lse, m, "lse");
    expect_close(o.max[r], want.max, m, "max");
    expect_close(o.sum[r], want.sum, m * static_cast<double>(want.score.size()), "sum");
    expect_close(o.magnitude[r], want.magnitude, m, "magnitude");
    expect_close(o.largest_product[r], want.largest_product, m, "largest_product");
    expect_close(o.largest_sum[r], want.largest_sum, m, "largest_sum");
    for (std::int64_t c = 0; c < v_dim; ++c) {
      const auto at = r * static_cast<std::size_t>(v_dim) + static_cast<std::size_t>(c);
      const auto column = static_cast<std::size_t>(c);
      const double size = m * (1 + static_cast<double>(want.v_mass[column]));
      expect_close(o.out[at], want.out[column], size, "out");
      expect_close(o.spread[at], want.spread[column], size, "spread");
      expect_close(o.deviation[at], want.deviation[column], size, "deviation");
      expect_close(o.v_mass[at], want.v_mass[column], size, "v_mass");
    }
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(Oracle, AgreesWithTheDefinitionOnRandomProblems) {
  Random random(17);
  for (int n = 0; n < rounds(150); ++n) {
    SCOPED_TRACE(n);
    static constexpr const char* kKernels[] = {"fwd_generic_f64", "fwd_generic_f32",
                                               "fwd_generic_f16", "fwd_generic_bf16"};
    const KernelInfo& kernel = *find_kernel(random.pick(kKernels));
    Sizes s{.batch = random.between(1, 2),
            .q_heads = 2,
            .kv_heads = random.between(1, 2),
            .q_len = random.between(1, 6),
            .kv_len = random.between(1, 9),
            .head_dim = random.between(1, 5),
            .v_dim = random.between(1, 4)};
    Inputs inputs = draw_inputs(random, kernel, s);
    inputs.options.kernel = nullptr;
    add_score_options(random, inputs);
    add_masks(random, inputs);
    inputs.options.partial = random.chance(0.2);
    if (random.chance(0.3)) {
      inputs.used_k = ints(std::vector<std::int64_t>(static_cast<std::size_t>(s.batch),
                                                     random.between(0, s.kv_len)));
    }
    if (random.chance(0.3)) {
      inputs.q_start =
          ints(std::vector<std::int64_t>(static_cast<std::size_t>(s.batch), random.between(-5, 9)));
    }
    if (random.chance(0.3)) {
      inputs.k_start =
          ints(std::vector<std::int64_t>(static_cast<std::size_t>(s.batch), random.between(-5, 5)));
    }
    expect_same_as_naive(inputs);
    if (HasFatalFailure()) return;
  }
}

TEST(Oracle, AgreesWithTheDefinitionOnVarlenProblems) {
  Random random(18);
  for (int n = 0; n < rounds(30); ++n) {
    Inputs in;
    in.q = draw_normal(random, DType::f32, {9, 2, 3});
    in.k = draw_normal(random, DType::f32, {12, 1, 3});
    in.v = draw_normal(random, DType::f32, {12, 1, 2});
    in.cu_seqlens_q = ints({0, random.between(0, 4), 4, 9});
    in.cu_seqlens_k = ints({1, 3, random.between(3, 12), 12});
    in.options.causal = random.chance(0.5);
    in.options.window_left = random.between(-1, 3);
    expect_same_as_naive(in);
    if (HasFatalFailure()) return;
  }
}

TEST(Oracle, DoesNotDependOnTheNumberOfThreads) {
  Random random(19);
  Inputs in = draw_inputs(random, *find_kernel("fwd_generic_f32"),
                          {.batch = 3,
                           .q_heads = 4,
                           .kv_heads = 2,
                           .q_len = 40,
                           .kv_len = 600,
                           .head_dim = 8,
                           .v_dim = 8});
  const reference::Oracle one = oracle_of(in, 1), four = oracle_of(in, 4);
  EXPECT_EQ(one.out, four.out);
  EXPECT_EQ(one.lse, four.lse);
  EXPECT_EQ(one.deviation, four.deviation);
}

TEST(Oracle, ComputesSelectedRows) {
  Random random(20);
  Inputs in = draw_inputs(random, *find_kernel("fwd_generic_f32"),
                          {.batch = 2,
                           .q_heads = 3,
                           .kv_heads = 1,
                           .q_len = 7,
                           .kv_len = 11,
                           .head_dim = 4,
                           .v_dim = 5});
  const Output output = make_output(in);
  const Tensors tensors = tensors_of(in, output.out, output.lse);
  const Problem problem = *make_problem(tensors, {});
  const reference::Oracle all =
      reference::compute(problem, tensors, reference::all_rows(problem, tensors));
  EXPECT_EQ(all.rows.size(), 2u * 3 * 7);
  const reference::Oracle some = reference::compute(problem, tensors, {{1, 2, 6}, {0, 1, 3}});
  const std::size_t last = all.rows.size() - 1;
  EXPECT_EQ(some.lse[0], all.lse[last]);
  EXPECT_EQ(some.out[4], all.out[last * 5 + 4]);
  EXPECT_EQ(some.lse[1], all.lse[7 + 3]);
  EXPECT_TRUE(some.scores.empty());
}

}  // namespace
}  // namespace flashcore::test
