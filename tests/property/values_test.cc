// Rounding, non-finite values, large scores, and the precision of f64.
#include <cmath>
#include <limits>
#include <map>

#include "backend/backend.h"
#include "check/check.h"
#include "support/kernel_test.h"

namespace flashcore::test {
namespace {

class Values : public KernelTest {};
FLASHCORE_FOR_EACH_KERNEL(Values);

TEST_P(Values, RightForInputsOfEveryMagnitude) {
  for (const double sigma : {0.01, 1.0, 10.0}) {
    for (int n = 0; n < rounds(15); ++n) {
      Inputs inputs = draw_inputs(random(), kernel(), draw_sizes(random(), kernel()), sigma);
      add_score_options(random(), inputs);
      add_masks(random(), inputs);
      inputs.options.num_splits = static_cast<std::int32_t>(random().between(0, 3));
      const Output output = attend(inputs);
      EXPECT_EQ(verdict(inputs, output), "") << "sigma " << sigma << ", draw " << n;
    }
  }
}

TEST_P(Values, NarrowOutputIsTheRoundedWideOutput) {
  for (int n = 0; n < rounds(15); ++n) {
    Inputs inputs = draw_call(random(), kernel());
    inputs.options.num_splits = static_cast<std::int32_t>(random().between(1, 3));
    const Output exact = attend(inputs, {.out = DType::f32});
    const Output narrow = attend(inputs, {.out = dtype()});
    ASSERT_TRUE(exact.status.ok()) << exact.status.message();
    if (dtype() == DType::f64) {
      FLASHCORE_EXPECT_SAME_BITS(exact.out, converted(narrow.out, DType::f32));
    } else {
      FLASHCORE_EXPECT_SAME_BITS(narrow.out, converted(exact.out, dtype()));
    }
    FLASHCORE_EXPECT_SAME_BITS(narrow.lse, exact.lse);
  }
}

TEST_P(Values, OutputDoesNotDependOnTheLse) {
  const Inputs inputs = draw_call(random(), kernel());
  const Output with_lse = attend(inputs);
  Output without = make_output(inputs);
  const Tensors tensors = tensors_of(inputs, without.out, {});
  const Plan plan = *make_plan(*make_problem(tensors, inputs.options), *device_info(Device{}));
  WorkspaceMemory workspace(plan.workspace_bytes);
  ASSERT_TRUE(run(plan, tensors, workspace.get()).ok());
  FLASHCORE_EXPECT_SAME_BITS(without.out, with_lse.out);
}

TEST_P(Values, NonFiniteInputsPropagateAsInTheOracle) {
  verify::CheckRunner runner(cpu_backend(), Device{}, *device_info(Device{}));
  int non_finite = 0;
  for (int n = 0; n < rounds(150); ++n) {
    verify::CaseSpec spec =
        verify::random_case(kernel(), 5, static_cast<std::uint64_t>(n),
                            {.target_work = 1 << 15, .sigma = {}, .splits = {}});
    spec.non_finite = true;
    const verify::CheckRunner::Outcome outcome = runner.check(spec);
    ASSERT_TRUE(outcome.passed()) << to_string(spec) << "\n" << outcome.failure();
    ++non_finite;
  }
  EXPECT_GT(non_finite, 0);
}

TEST_P(Values, OneNanReachesExactlyTheRowsThatSeeIt) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Inputs inputs = draw_inputs(random(), kernel(),
                              {.batch = 2,
                               .q_heads = 2,
                               .kv_heads = 2,
                               .q_len = 70,
                               .kv_len = 70,
                               .head_dim = 16,
                               .v_dim = 8});
  inputs.options.causal = true;
  const Output clean = attend(inputs);
  // NaN in K: queries 40 and later of (batch 1, head 0) see key 40.
  Inputs bad = inputs;
  bad.k.set({1, 0, 40, 3}, nan);
  const Output output = attend(bad);
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t h = 0; h < 2; ++h) {
      for (std::int64_t i = 0; i < 70; ++i) {
        const bool sees = b == 1 && h == 0 && i >= 40;
        ASSERT_EQ(std::isnan(output.lse.at({b, h, i})), sees);
        if (!sees) {
          ASSERT_EQ(output.lse.at({b, h, i}), clean.lse.at({b, h, i}));
        }
        for (std::int64_t c = 0; c < 8; ++c) {
          ASSERT_EQ(std::isnan(output.out.at({b, h, i, c})), sees);
          if (!sees) {
            ASSERT_EQ(output.out.at({b, h, i, c}), clean.out.at({b, h, i, c}));
          }
        }
      }
    }
  }
  // NaN in Q affects its own row.
  bad = inputs;
  bad.q.set({0, 1, 5, 0}, nan);
  const Output of_q = attend(bad);
  for (std::int64_t i = 0; i < 70; ++i) {
    ASSERT_EQ(std::isnan(of_q.lse.at({0, 1, i})), i == 5);
    ASSERT_EQ(std::isnan(of_q.out.at({0, 1, i, 7})), i == 5);
  }
}

TEST_P(Values, ScoresOfMinusInfinityHideTheirKeys) {
  // Infinite operands, and finite ones whose product overflows the compute type.
  const double infinity = std::numeric_limits<double>::infinity();
  std::vector<std::pair<double, double>> operands = {{1.0, -infinity}};
  if (dtype() == DType::f32 || dtype() == DType::bf16) operands.emplace_back(1e30, -1e30);
  const std::int64_t rows = 70, keys = 90, column = 17;
  for (const auto& [q, k] : operands) {
    Inputs hidden = draw_inputs(random(), kernel(),
                                {.batch = 1,
                                 .q_heads = 2,
                                 .kv_heads = 1,
                                 .q_len = rows,
                                 .kv_len = keys,
                                 .head_dim = 40,
                                 .v_dim = 24});
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t h = 0; h < 2; ++h) hidden.q.set({0, h, i, column}, q);
    }
    hidden.mask = Tensor(DType::boolean, {1, 1, 1, keys});
    Inputs low = hidden;
    low.mask.fill(1.0);
    for (std::int64_t key = 0; key < keys; ++key) {
      const bool is_low = key % 7 == 3;
      hidden.k.set({0, 0, key, column}, 0.0);
      low.k.set({0, 0, key, column}, is_low ? k : 0.0);
      hidden.mask.set({0, 0, 0, key}, is_low ? 0.0 : 1.0);
    }
    FLASHCORE_EXPECT_SAME(attend(low), attend(hidden));
  }
}

TEST_P(Values, AnInfiniteQueryAffectsItsOwnRow) {
  const double infinity = std::numeric_limits<double>::infinity();
  Inputs inputs = draw_inputs(random(), kernel(),
                              {.batch = 1,
                               .q_heads = 1,
                               .kv_heads = 1,
                               .q_len = 70,
                               .kv_len = 90,
                               .head_dim = 40,
                               .v_dim = 24});
  for (std::int64_t key = 0; key < 90; ++key) inputs.k.set({0, 0, key, 17}, -2.0);
  const Output clean = attend(inputs);
  inputs.q.set({0, 0, 33, 17}, infinity);
  const Output output = attend(inputs);
  for (std::int64_t i = 0; i < 70; ++i) {
    const double want = i == 33 ? -infinity : clean.lse.at({0, 0, i});
    ASSERT_EQ(output.lse.at({0, 0, i}), want) << i;
    ASSERT_EQ(output.out.at({0, 0, i, 5}), i == 33 ? 0.0 : clean.out.at({0, 0, i, 5})) << i;
  }
}

TEST_P(Values, RowsWithoutKeysAreZeroForAnyV) {
  for (const bool sinks : {false, true}) {
    for (const std::int32_t splits : {1, 3}) {
      Inputs inputs = draw_inputs(random(), kernel(),
                                  {.batch = 2,
                                   .q_heads = 4,
                                   .kv_heads = 2,
                                   .q_len = 150,
                                   .kv_len = 70,
                                   .head_dim = 16,
                                   .v_dim = 24});
      inputs.options.causal = true;  // hides all keys from the first 80 queries
      inputs.options.num_splits = splits;
      inputs.v.fill(std::numeric_limits<double>::quiet_NaN());
      if (sinks) inputs.sinks = draw_normal(random(), DType::f32, {4});
      const Output output = attend(inputs);
      ASSERT_TRUE(output.status.ok()) << output.status.message();
      for (std::int64_t b = 0; b < 2; ++b) {
        for (std::int64_t h = 0; h < 4; ++h) {
          const double lse =
              sinks ? inputs.sinks.at({h}) : -std::numeric_limits<double>::infinity();
          for (std::int64_t i = 0; i < 80; ++i) {
            for (std::int64_t c = 0; c < 24; ++c) ASSERT_EQ(output.out.at({b, h, i, c}), 0.0);
            if (sinks) {
              ASSERT_NEAR(output.lse.at({b, h, i}), lse, 1e-5);
            } else {
              ASSERT_EQ(output.lse.at({b, h, i}), lse);
            }
          }
          EXPECT_TRUE(std::isnan(output.out.at({b, h, 80, 0})));  // sees a key
        }
      }
    }
  }
}

TEST_P(Values, DistantScoresDoNotOverflow) {
  // The weights of all keys but one underflow to 0 in every format.
  Inputs inputs = draw_inputs(random(), kernel(),
                              {.batch = 1,
                               .q_heads = 1,
                               .kv_heads = 1,
                               .q_len = 3,
                               .kv_len = 200,
                               .head_dim = 4,
                               .v_dim = 5});
  inputs.q.fill(100);
  inputs.k.fill(-100);
  for (std::int64_t d = 0; d < 4; ++d) inputs.k.set({0, 0, 137, d}, 100);
  for (const std::int32_t splits : {1, 2}) {
    inputs.options.num_splits = splits;
    const Output output = attend(inputs);
    ASSERT_TRUE(output.status.ok()) << output.status.message();
    for (std::int64_t c = 0; c < 5; ++c) {
      EXPECT_EQ(output.out.at({0, 0, 1, c}), inputs.v.at({0, 0, 137, c}));
    }
    EXPECT_EQ(verdict(inputs, output), "");
  }
}

TEST_P(Values, LongSumsDoNotDrift) {
  // 40,000 equal weights: one running f32 sum would have an error of thousands of ulps.
  Inputs inputs = draw_inputs(random(), kernel(),
                              {.batch = 1,
                               .q_heads = 1,
                               .kv_heads = 1,
                               .q_len = 1,
                               .kv_len = 40000,
                               .head_dim = 1,
                               .v_dim = 1});
  inputs.q.fill(0);
  inputs.v.fill(1);
  for (const std::int32_t splits : {0, 1}) {
    inputs.options.num_splits = splits;
    const Output output = attend(inputs);
    ASSERT_TRUE(output.status.ok()) << output.status.message();
    EXPECT_NEAR(output.lse.at({0, 0, 0}), std::log(40000.0), 2e-6);
    EXPECT_NEAR(output.out.at({0, 0, 0, 0}), 1.0, dtype() == DType::f64 ? 1e-15 : 1e-6);
  }
}

TEST_P(Values, ZeroAndNegativeScalesAreRight) {
  Inputs inputs = draw_inputs(random(), kernel(), draw_sizes(random(), kernel()));
  inputs.options.scale = 0.0;
  Output output = attend(inputs);
  EXPECT_EQ(verdict(inputs, output), "");
  EXPECT_NEAR(output.lse.at({0, 0, 0}), std::log(static_cast<double>(inputs.k.size(2))), 1e-5);
  inputs.options.scale = -0.7;
  output = attend(inputs);
  EXPECT_EQ(verdict(inputs, output), "");
  Inputs negated = inputs;
  std::vector<double> q = inputs.q.values();
  for (double& x : q) x = -x;
  negated.q = tensor_of(dtype(), inputs.q.shape(), q);
  negated.options.scale = 0.7;
  const Output same = attend(negated);
  FLASHCORE_EXPECT_SAME(output, same);
}

TEST(ValuesF64, ErrorIsBelow1em12) {
  Random random(3);
  for (const KernelInfo* kernel : runnable_kernels()) {
    if (kernel->dtype != DType::f64) continue;
    for (int n = 0; n < rounds(20); ++n) {
      Inputs inputs = draw_call(random, *kernel);
      inputs.options.num_splits = static_cast<std::int32_t>(random.between(1, 3));
      const Output output = attend(inputs);
      EXPECT_EQ(verdict(inputs, output), "");
      // Arithmetic in f32 would have an error of at least 1e-8.
      const auto bounds = out_bounds(inputs, output);
      for (const double bound : bounds) ASSERT_LT(bound, 1e-12);
    }
  }
}

}  // namespace
}  // namespace flashcore::test
