// The error bound equals the formula of docs/numerics.md and accepts correct results.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "unit/verify/judged.h"
#include "unit/verify/naive.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::test {
namespace {

double unit(DType dtype) {
  switch (dtype) {
    case DType::f64: return std::ldexp(1.0, -52);
    case DType::f16: return std::ldexp(1.0, -11);
    case DType::bf16: return std::ldexp(1.0, -8);
    default: return std::ldexp(1.0, -24);
  }
}

double smallest(DType dtype) {
  return std::ldexp(1.0, dtype == DType::f64 ? -1022 : dtype == DType::f16 ? -24 : -126);
}

/// The most keys that share a score, less one. 17 keys: the limit of equal roundings is not
/// reached.
double naive_equal_keys(const NaiveRow& row) {
  std::ptrdiff_t most = 1;
  for (const long double score : row.score) {
    if (!std::isfinite(score) || score <= row.max - 40) continue;
    most = std::max(most, std::count_if(row.score.begin(), row.score.end(), [&](long double s) {
                      return s <= score && score - s <= 0x1p-24L * std::max(1.0L, std::fabs(score));
                    }));
  }
  return static_cast<double>(most - 1);
}

TEST(Bound, EqualsTheDocumentedFormula) {
  Random random(31);
  for (int n = 0; n < rounds(60); ++n) {
    static constexpr DType kTypes[] = {DType::f64, DType::f32, DType::f16, DType::bf16};
    const DType dtype = random.pick(kTypes);
    Inputs inputs = default_inputs(random.bits(), dtype, random.chance(0.5) ? 1.0 : 10.0, 17);
    add_score_options(random, inputs);
    add_masks(random, inputs);
    const Judged judged(inputs, random.chance(0.3) ? DType::f32 : DType::none);
    const DType out = judged.output.out.dtype(), p = wide(dtype);
    const double u = dtype == DType::f64 ? unit(DType::f64) : unit(DType::f32);
    for (std::size_t r = 0; r < judged.oracle.rows.size(); r += 7) {
      const auto [b, h, i] = judged.oracle.rows[r];
      const NaiveRow row = naive_row(inputs, b, h, i);
      const double delta = u * (4 + std::sqrt(16.0)) * static_cast<double>(row.magnitude);
      const double equal = naive_equal_keys(row);
      for (std::size_t c = 0; c < 16; c += 5) {
        const double ref = std::fabs(static_cast<double>(row.out[c]));
        const double want = 2 * unit(out) * ref +
                            4 * (unit(p) + u * std::sqrt(17.0)) *
                                std::max(static_cast<double>(row.spread[c]), ref) +
                            u * equal * (ref + static_cast<double>(row.deviation[c])) +
                            delta * static_cast<double>(row.deviation[c]) + smallest(out) +
                            smallest(p) * static_cast<double>(row.v_mass[c]);
        ASSERT_NEAR(verify::out_bound(judged.oracle, r, c, judged.arithmetic), want, 1e-9 * want);
      }
      if (!std::isfinite(row.lse)) continue;
      const double want = 2e-6 * u / unit(DType::f32) + u * (std::sqrt(17.0) + equal) + delta +
                          2 * u * std::fabs(static_cast<double>(row.lse));
      ASSERT_NEAR(verify::lse_bound(judged.oracle, r, judged.arithmetic), want, 1e-9 * want);
    }
  }
}

// A 16-bit P means tensor cores, which cut the sums of scores.
TEST(Bound, IsLargerForCutSums) {
  Judged judged(default_inputs(7));
  reference::Oracle& o = judged.oracle;
  o.head_dim = 256;
  o.magnitude[3] = 2;
  o.largest_cut[3] = 20;
  const auto bound = [&](DType p) {
    return verify::score_bound(o, 3, verify::arithmetic_of(p, p));
  };
  const double u = unit(DType::f32), rounded = u * (4 + 16) * 2;
  for (const DType p : {DType::f32, DType::f16, DType::bf16}) EXPECT_DOUBLE_EQ(bound(p), rounded);
  o.largest_cut[3] = 64;
  EXPECT_DOUBLE_EQ(bound(DType::f32), rounded);
  EXPECT_DOUBLE_EQ(bound(DType::f16), u * (8 + 64));
  EXPECT_DOUBLE_EQ(bound(DType::bf16), u * (8 + 64));
}

double bound_of(const Inputs& inputs, DType out = DType::none) {
  const Judged judged(inputs, out);
  return verify::out_bound(judged.oracle, 5, 7, judged.arithmetic);
}

Tensor scaled(const Tensor& tensor, double factor) {
  std::vector<double> values = tensor.values();
  for (double& x : values) x *= factor;
  return tensor_of(tensor.dtype(), tensor.shape(), values);
}

TEST(Bound, DependsOnEachInput) {
  const Inputs base = default_inputs(12);
  const double bound = bound_of(base);
  Inputs changed = base;
  changed.v = scaled(base.v, 1024.0);  // errors scale with V
  EXPECT_NEAR(bound_of(changed) / bound, 1024.0, 1e-6);
  changed = base;
  changed.q = scaled(base.q, 16.0);  // larger scores have larger errors
  EXPECT_GT(verify::lse_bound(Judged(changed).oracle, 5, Judged(changed).arithmetic),
            4 * verify::lse_bound(Judged(base).oracle, 5, Judged(base).arithmetic));
  changed = base;
  changed.options.softcap = 250;  // a cap far above the scores still adds its roundings
  EXPECT_GT(bound_of(changed), 10 * bound);
  changed.options.softcap = 1e6;  // a larger cap uses another formula
  EXPECT_NEAR(bound_of(changed) / bound, 1, 1e-3);
  changed = base;
  changed.bias = Tensor(DType::f32, {1, 1, 1, 40});
  changed.bias.fill(1000);  // shifts all scores: the same result with a larger error
  EXPECT_GT(bound_of(changed), 10 * bound);
  changed = base;
  changed.alibi_slopes = tensor_of(DType::f32, {4}, {20, 20, 20, 20});
  EXPECT_GT(Judged(changed).oracle.magnitude[0], 20 * 30);
  changed.alibi_slopes = tensor_of(DType::f32, {4}, {5e3, 5e3, 5e3, 5e3});
  EXPECT_LT(Judged(changed).oracle.magnitude[0], 5e3);  // ignores keys without weight
  EXPECT_LT(bound, bound_of(default_inputs(12, DType::f16)));
  EXPECT_LT(bound_of(default_inputs(12, DType::f16)), bound_of(default_inputs(12, DType::bf16)));
  EXPECT_LT(bound_of(default_inputs(12, DType::f64)), 1e-7 * bound);
  // A narrow input with f32 output has the bound of f32.
  EXPECT_LT(bound_of(default_inputs(12, DType::bf16), DType::f32),
            0.1 * bound_of(default_inputs(12, DType::bf16)));
}

// One key with most of the weight and 160 others that share a score: each addition rounds alike, so
// the error is not that of a random walk.
TEST(Bound, AllowsEqualTermsToRoundAlike) {
  const double u = unit(DType::f32), walk = 4 * (u + u * std::sqrt(173.0));
  const auto term = static_cast<float>(std::exp(-11.1675339));
  float sum = 1;
  for (int key = 0; key < 160; ++key) sum += term;
  const double error = std::fabs(sum - (1 + 160.0 * term));
  EXPECT_GT(error, walk);
  EXPECT_LT(error, 159 * u);

  Inputs inputs = default_inputs(14);
  const Judged different(inputs);
  EXPECT_EQ(different.oracle.equal_keys[5], 0);
  inputs.k.fill(0.0);
  Judged equal(inputs);
  const auto keys = static_cast<double>(equal.oracle.equal_keys[5]);
  EXPECT_EQ(keys, equal.oracle.kv_len[5] - 1);
  const double bound = verify::out_bound(equal.oracle, 5, 7, equal.arithmetic);
  const double lse_bound = verify::lse_bound(equal.oracle, 5, equal.arithmetic);
  equal.oracle.equal_keys[5] = 0;
  const std::size_t at = 5 * 16 + 7;
  const double more = u * keys * (std::fabs(equal.oracle.out[at]) + equal.oracle.deviation[at]);
  EXPECT_NEAR(bound - verify::out_bound(equal.oracle, 5, 7, equal.arithmetic), more, 1e-6 * more);
  EXPECT_NEAR(lse_bound - verify::lse_bound(equal.oracle, 5, equal.arithmetic), u * keys,
              1e-6 * u * keys);
  // A tile's keys, and then the tiles, are summed on their own.
  equal.oracle.kv_len[5] = 12000;
  equal.oracle.equal_keys[5] = 11999;
  const double lse_without = [&] {
    reference::Oracle none = equal.oracle;
    none.equal_keys[5] = 0;
    return verify::lse_bound(none, 5, equal.arithmetic);
  }();
  EXPECT_NEAR(verify::lse_bound(equal.oracle, 5, equal.arithmetic) - lse_without, 1256 * u,
              1e-6 * 1256 * u);
}

TEST(Bound, OfConstantVDoesNotDependOnTheScores) {
  Inputs inputs = default_inputs(13, DType::f32, 10.0);
  inputs.v.fill(3.0);
  const double bound = bound_of(inputs);
  inputs.q = scaled(inputs.q, 100.0);
  EXPECT_NEAR(bound_of(inputs) / bound, 1.0, 1e-3);
}

// P times the scale of V is rounded to f16, relative to the largest scale. A product below 2^-24 of
// that is lost, even if the scale of its own value is small.
TEST(Bound, OfScaledWeightsDependsOnTheLargestScale) {
  Tensor q(DType::f16, {1, 1, 1, 16}), out(DType::f16, {1, 1, 1, 16});
  Tensor k(DType::e4m3, {1, 1, 2, 16}), v(DType::e4m3, {1, 1, 2, 16});
  q.fill(0.0);
  k.fill(0.0);
  v.fill(1.0);
  const Tensor k_scale = tensor_of(DType::f32, {1, 1, 2}, {1, 1});
  const Tensor v_scale = tensor_of(DType::f32, {1, 1, 2}, {1, 0.125});
  const Tensors tensors{.q = q.view(),
                        .k = k.view(),
                        .v = v.view(),
                        .out = out.view(),
                        .k_scale = k_scale.view(),
                        .v_scale = v_scale.view()};
  Options options;
  options.kv_scale_block = 1;
  const Result<Problem> problem = make_problem(tensors, options);
  ASSERT_TRUE(problem.ok()) << problem.status().message();
  const reference::Oracle oracle =
      reference::compute(*problem, tensors, reference::all_rows(*problem, tensors));
  EXPECT_NEAR(oracle.v_mass[3], (1 + 0.125) / 2, 1e-12);
  EXPECT_NEAR(oracle.v_mass_in_steps[3], (1 + 1) / 2.0, 1e-12);
  verify::Arithmetic arithmetic = verify::arithmetic_of(DType::f16, DType::f16);
  const double scaled = verify::out_bound(oracle, 0, 3, arithmetic);
  arithmetic.scales_p = false;
  EXPECT_NEAR(scaled - verify::out_bound(oracle, 0, 3, arithmetic), std::ldexp(0.4375, -24), 1e-12);
  EXPECT_FALSE(verify::arithmetic_of(DType::f16, DType::e4m3).scales_p);  // scales the output
}

/// Rounds the oracle's result to the format of the outputs and stores it there.
void store_result(const reference::Oracle& oracle, const Problem& p, const Tensors& result) {
  for (std::size_t r = 0; r < oracle.rows.size(); ++r) {
    const auto [b, h, i] = oracle.rows[r];
    std::int64_t row = i;
    if (p.q_varlen) row += static_cast<const std::int32_t*>(result.cu_seqlens_q.data)[b];
    for (std::int64_t c = 0; c < p.v_dim; ++c) {
      verify::store(
          result.out.data, p.out.dtype,
          b * p.out.batch + h * p.out.head + row * p.out.row + c * p.out.column,
          oracle.out[r * static_cast<std::size_t>(p.v_dim) + static_cast<std::size_t>(c)]);
    }
    if (result.lse.given()) {
      verify::store(result.lse.data, p.lse.dtype,
                    b * p.lse.batch + h * p.lse.head + row * p.lse.row, oracle.lse[r]);
    }
  }
}

TEST(Bound, AcceptsTheRoundedOracleOnRandomProblems) {
  const int problems = std::max(rounds(150), 60);  // enough to draw every option below
  std::map<std::string, int> seen;
  for (const char* id :
       {"fwd_generic_f64", "fwd_generic_f32", "fwd_generic_f16", "fwd_generic_bf16"}) {
    const KernelInfo& kernel = *find_kernel(id);
    for (const double sigma : {0.01, 1.0, 10.0}) {
      for (int n = 0; n < problems; ++n) {
        const verify::CaseSpec spec =
            verify::random_case(kernel, 77, static_cast<std::uint64_t>(n),
                                {.target_work = 1 << 15, .sigma = sigma, .splits = {}});
        const verify::CaseMemory memory(spec);
        const Problem problem = *make_problem(memory.tensors(), memory.spec().options);
        const reference::Oracle oracle = reference::compute(
            problem, memory.tensors(), reference::all_rows(problem, memory.tensors()), false, 1);
        std::vector<std::byte> bytes = memory.bytes();
        const Tensors result = memory.at(bytes.data(), Device{});
        store_result(oracle, problem, result);
        const verify::Comparison c =
            verify::compare(oracle, problem, result,
                            verify::arithmetic_of(problem.out.dtype, kernel.probability_dtype));
        ASSERT_TRUE(c.ok) << to_string(spec) << "\n" << verify::report(c);
        for (const std::string& feature : verify::features(spec)) ++seen[feature];
      }
    }
  }
  for (const char* feature : {"softcap", "alibi", "bias", "sinks", "mask", "non_finite", "causal",
                              "cu_seqlens_q", "partial", "out_f32"}) {
    EXPECT_GT(seen[feature], 0) << feature;
  }
}

}  // namespace
}  // namespace flashcore::test
