// Call variants have the documented effect. The oracle computes them; no kernel runs.
#include "verify/inputs/call_variants.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "verify/inputs/case_memory.h"

namespace flashcore::test {
namespace {

using verify::HostCall;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Problem problem_of(const HostCall& call) {
  const Result<Problem> problem = make_problem(call.tensors, call.options);
  EXPECT_TRUE(problem.ok()) << problem.status().message();
  return *problem;
}

reference::Oracle oracle_of(const HostCall& call) {
  const Problem problem = problem_of(call);
  return reference::compute(problem, call.tensors, reference::all_rows(problem, call.tensors),
                            true);
}

verify::CaseSpec small_case() {
  verify::CaseSpec spec;
  spec.dtype = DType::f32;
  spec.batch = 2, spec.q_heads = 4, spec.kv_heads = 2;
  spec.q_len = 5, spec.kv_len = 19, spec.head_dim = 8, spec.v_dim = 7;
  spec.lse = true;
  return spec;
}

/// All options that change scores.
verify::CaseSpec every_score_option() {
  verify::CaseSpec spec = small_case();
  spec.options.softcap = 4;
  spec.options.window_left = 9;
  spec.bias = spec.mask = {true, true, true, true};
  spec.alibi = 2;
  spec.sinks = true;
  return spec;
}

verify::CaseSpec varlen_case() {
  verify::CaseSpec spec = every_score_option();
  spec.q_varlen = spec.kv_varlen = spec.used_k = true;
  spec.q_start = spec.k_start = true;
  return spec;
}

std::vector<verify::CaseSpec> cases() {
  verify::CaseSpec partial = every_score_option();
  partial.options.partial = true;
  verify::CaseSpec shared = small_case();
  shared.shared_kv = true;
  shared.v_layout = verify::MemoryLayout::strided_columns;
  return {small_case(), every_score_option(), varlen_case(), partial, shared};
}

TEST(CallVariants, CopiesOfACallShareNoMemory) {
  const HostCall call = verify::random_call(small_case());
  HostCall copy = call;
  verify::store(copy.tensors.q.data, DType::f32, 0, 123);
  EXPECT_NE(reference::element(call.tensors.q.data, DType::f32, 0), 123);
  copy.place(&Tensors::seqused_k, DType::i32, {2});
  EXPECT_EQ(reference::element(copy.tensors.q.data, DType::f32, 0), 123)
      << "place() keeps the other tensors";
  EXPECT_FALSE(call.tensors.seqused_k.given());
}

TEST(CallVariants, WideOutputsAddAnLse) {
  verify::CaseSpec spec = varlen_case();
  spec.dtype = DType::f16;
  spec.lse = false;
  const HostCall wide = verify::with_wide_outputs(verify::random_call(spec));
  EXPECT_EQ(problem_of(wide).out.dtype, DType::f32);
  EXPECT_EQ(problem_of(wide).lse.dtype, DType::f32);
}

TEST(CallVariants, OneHotValuesReturnProbabilities) {
  for (const verify::CaseSpec& spec : cases()) {
    SCOPED_TRACE(to_string(spec));
    const HostCall call = verify::random_call(spec);
    const reference::Oracle whole = oracle_of(call);
    const Problem problem = problem_of(call);
    for (std::int64_t first = 0; first < problem.kv_len; first += problem.v_dim) {
      const Result<HostCall> probe = verify::with_one_hot_values(call, first);
      ASSERT_TRUE(probe.ok()) << probe.status().message();
      const reference::Oracle want = oracle_of(*probe);
      const reference::Oracle got = verify::one_hot_oracle(whole, problem, call.tensors, first);
      for (const auto array : {&reference::Oracle::out, &reference::Oracle::spread,
                               &reference::Oracle::deviation, &reference::Oracle::v_mass}) {
        ASSERT_EQ((got.*array).size(), (want.*array).size());
        for (std::size_t i = 0; i < (want.*array).size(); ++i) {
          ASSERT_NEAR((got.*array)[i], (want.*array)[i], 1e-12);
        }
      }
      for (std::size_t r = 0; r < whole.rows.size(); ++r) {
        for (std::size_t c = 0; c < static_cast<std::size_t>(problem.v_dim); ++c) {
          const std::size_t key = static_cast<std::size_t>(first) + c;
          const auto& p = whole.probabilities[r];
          ASSERT_NEAR(want.out[r * static_cast<std::size_t>(problem.v_dim) + c],
                      key < p.size() ? p[key] : 0.0, 1e-12);
        }
      }
    }
  }
}

TEST(CallVariants, OneHotValuesRejectABroadcastV) {
  HostCall call = verify::random_call(small_case());
  call.tensors.v.strides[2] = 0;
  const Result<HostCall> probe = verify::with_one_hot_values(call, 0);
  ASSERT_FALSE(probe.ok());
  EXPECT_NE(probe.status().message().find("stride of 0"), std::string::npos);
}

TEST(CallVariants, UniformProbabilitiesAreOneOverTheVisibleKeys) {
  for (const verify::CaseSpec& spec : cases()) {
    const reference::Oracle o =
        oracle_of(verify::with_uniform_probabilities(verify::random_call(spec)));
    for (std::size_t r = 0; r < o.rows.size(); ++r) {
      std::int64_t visible = 0;
      for (const double score : o.scores[r]) {
        visible += score != -kInfinity;
        EXPECT_TRUE(score == -kInfinity || score == 0);
      }
      for (std::size_t j = 0; j < o.scores[r].size(); ++j) {
        if (o.scores[r][j] == 0) {
          EXPECT_NEAR(o.probabilities[r][j], 1.0 / static_cast<double>(visible), 1e-15);
        }
      }
    }
  }
}

TEST(CallVariants, SelectedKeysGetTheWholeWeight) {
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    for (const double scale : {0.25, -2.0}) {
      verify::CaseSpec spec = small_case();
      spec.dtype = dtype;
      spec.options.scale = scale;
      const reference::Oracle o = oracle_of(verify::with_selected_keys(verify::random_call(spec)));
      std::size_t selected_keys = 0;
      for (std::size_t j = 0; j < 19; ++j) {
        bool selected = false;
        for (const auto& p : o.probabilities) {
          EXPECT_TRUE(p[j] == 0 || p[j] == 1) << p[j];
          selected = selected || p[j] == 1;
        }
        selected_keys += selected;
      }
      EXPECT_GT(selected_keys, 10u) << "too few different keys are selected";
    }
  }
}

TEST(CallVariants, SelectedKeysShareTheWeightIfDigitsAreMissing) {
  verify::CaseSpec spec = small_case();
  spec.head_dim = 2;  // 19 keys need five binary digits
  const reference::Oracle o = oracle_of(verify::with_selected_keys(verify::random_call(spec)));
  for (const auto& p : o.probabilities) {
    double largest = 0;
    for (const double x : p) largest = std::max(largest, x);
    for (const double x : p) EXPECT_TRUE(x == 0 || x == largest);
    EXPECT_GE(largest, 1.0 / 5);
  }
}

TEST(CallVariants, ScaledScoresAreMultiples) {
  for (const verify::CaseSpec& spec : cases()) {
    const HostCall call = verify::random_call(spec);
    const reference::Oracle whole = oracle_of(call);
    const reference::Oracle scaled = oracle_of(verify::with_scaled_scores(call, 0.125));
    for (std::size_t r = 0; r < whole.rows.size(); ++r) {
      for (std::size_t j = 0; j < whole.scores[r].size(); ++j) {
        if (whole.scores[r][j] == -kInfinity) {
          EXPECT_EQ(scaled.scores[r][j], -kInfinity);
        } else {
          EXPECT_NEAR(scaled.scores[r][j], 0.125 * whole.scores[r][j], 1e-12);
        }
      }
    }
  }
}

/// out and LSE over keys begin <= j < end, summed from the scores and V.
reference::Oracle sums_over(const HostCall& call, std::int64_t begin, std::int64_t end) {
  HostCall without_sinks = call;
  without_sinks.options.partial = false;
  without_sinks.tensors.sinks = {};
  const Tensors& tensors = without_sinks.tensors;
  const Problem problem = problem_of(without_sinks);
  reference::Oracle o = oracle_of(without_sinks);
  const auto v_dim = static_cast<std::size_t>(problem.v_dim);
  for (std::size_t r = 0; r < o.rows.size(); ++r) {
    double sum = 0;
    std::vector<double> out(v_dim, 0.0);
    const reference::Lengths l = reference::lengths_of(problem, tensors, o.rows[r].b);
    for (std::int64_t j = begin; j < std::min(end, l.kv_len); ++j) {
      const double weight = std::exp(o.scores[r][static_cast<std::size_t>(j)]);
      sum += weight;
      for (std::size_t c = 0; c < v_dim && weight > 0; ++c) {
        const std::int64_t kv_head = o.rows[r].h / (problem.q_heads / problem.kv_heads);
        out[c] +=
            weight * reference::element(tensors.v.data, problem.v.dtype,
                                        o.rows[r].b * problem.v.batch + kv_head * problem.v.head +
                                            (l.k_row + j) * problem.v.row +
                                            static_cast<std::int64_t>(c) * problem.v.column);
      }
    }
    o.lse[r] = std::log(sum);
    for (std::size_t c = 0; c < v_dim; ++c) o.out[r * v_dim + c] = sum > 0 ? out[c] / sum : 0.0;
  }
  return o;
}

TEST(CallVariants, TheOracleOnSomeKeysIsTheirPartialResult) {
  for (const verify::CaseSpec& spec : cases()) {
    SCOPED_TRACE(to_string(spec));
    const HostCall call = verify::random_call(spec);
    const Problem problem = problem_of(call);
    for (const auto& [begin, end] :
         {std::pair<std::int64_t, std::int64_t>{0, 6}, {6, 12}, {12, 19}, {0, 19}}) {
      const reference::Oracle want = sums_over(call, begin, end);
      const reference::Oracle got =
          verify::compute_on_keys(problem, call.tensors, want.rows, begin, end);
      for (std::size_t r = 0; r < want.rows.size(); ++r) {
        if (want.lse[r] == -kInfinity) {
          EXPECT_EQ(got.lse[r], -kInfinity);
        } else {
          EXPECT_NEAR(got.lse[r], want.lse[r], 1e-12);
        }
      }
      for (std::size_t i = 0; i < want.out.size(); ++i) {
        EXPECT_NEAR(got.out[i], want.out[i], 1e-12);
      }
    }
  }
}

TEST(CallVariants, FewerKeysKeepTheirPositions) {
  for (const verify::CaseSpec& spec : cases()) {
    const HostCall call = verify::random_call(spec);
    const reference::Oracle whole = oracle_of(call);
    const reference::Oracle some = oracle_of(verify::with_keys_up_to(call, problem_of(call), 11));
    for (std::size_t r = 0; r < whole.rows.size(); ++r) {
      const std::size_t keys = std::min<std::size_t>(whole.scores[r].size(), 11);
      ASSERT_EQ(some.scores[r].size(), keys);
      for (std::size_t j = 0; j < keys; ++j) EXPECT_EQ(some.scores[r][j], whole.scores[r][j]);
    }
  }
}

}  // namespace
}  // namespace flashcore::test
