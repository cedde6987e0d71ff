// The gradients of the oracle against finite differences of the forward oracle, identities and
// hand-computed values.
#include "reference/oracle_bwd.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/draw.h"

namespace flashcore::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// A call in f64 with gradients of out and, if given, lse.
struct GradientCall {
  Inputs inputs;
  Output output;  // the oracle's out and lse
  Tensor dout, dlse;

  reference::Oracle forward() const {
    const Tensors tensors = tensors_of(inputs, output.out, output.lse);
    return reference::compute(*make_problem(tensors, inputs.options), tensors,
                              reference::all_rows(*make_problem(tensors, inputs.options), tensors),
                              false, 1);
  }
  reference::GradientOracle backward() const {
    const Tensors tensors = tensors_of(inputs, output.out, output.lse);
    const Result<Problem> problem = make_problem(tensors, inputs.options);
    EXPECT_TRUE(problem.ok()) << problem.status().message();
    return reference::compute_gradients(*problem, tensors,
                                        {.dout = dout.view(), .dlse = dlse.view()}, {}, true);
  }
  Shape out_index(const reference::RowId& row, std::int64_t column) const {
    if (!inputs.cu_seqlens_q.given()) return {row.b, row.h, row.i, column};
    return {static_cast<std::int64_t>(inputs.cu_seqlens_q.at({row.b})) + row.i, row.h, column};
  }
  Shape lse_index(const reference::RowId& row) const {
    if (!inputs.cu_seqlens_q.given()) return {row.b, row.h, row.i};
    return {row.h, static_cast<std::int64_t>(inputs.cu_seqlens_q.at({row.b})) + row.i};
  }
  /// Writes the oracle's results into output.
  void run_forward() {
    const reference::Oracle o = forward();
    for (std::size_t r = 0; r < o.rows.size(); ++r) {
      for (std::int64_t c = 0; c < o.v_dim; ++c) {
        output.out.set(out_index(o.rows[r], c),
                       o.out[r * static_cast<std::size_t>(o.v_dim) + static_cast<std::size_t>(c)]);
      }
      output.lse.set(lse_index(o.rows[r]), o.lse[r]);
    }
  }
  /// Σ dout·out + Σ dlse·lse, over the rows that see a key or a sink.
  double loss() const {
    const reference::Oracle o = forward();
    double sum = 0;
    for (std::size_t r = 0; r < o.rows.size(); ++r) {
      for (std::int64_t c = 0; c < o.v_dim; ++c) {
        sum += dout.at(out_index(o.rows[r], c)) *
               o.out[r * static_cast<std::size_t>(o.v_dim) + static_cast<std::size_t>(c)];
      }
      if (dlse.given() && std::isfinite(o.lse[r])) sum += dlse.at(lse_index(o.rows[r])) * o.lse[r];
    }
    return sum;
  }
};

GradientCall gradient_call(Random& random, Inputs inputs, bool with_dlse) {
  GradientCall call{std::move(inputs), {}, {}, {}};
  call.inputs.options.kernel = nullptr;
  call.output = make_output(call.inputs);
  call.dout = draw_normal(random, DType::f64, call.output.out.shape());
  if (with_dlse) call.dlse = draw_normal(random, DType::f64, call.output.lse.shape());
  call.run_forward();
  return call;
}

Shape unravel(const Tensor& tensor, std::size_t flat) {
  Shape index(static_cast<std::size_t>(tensor.rank()));
  for (int axis = tensor.rank() - 1; axis >= 0; --axis) {
    const auto extent = static_cast<std::size_t>(tensor.size(axis));
    index[static_cast<std::size_t>(axis)] = static_cast<std::int64_t>(flat % extent);
    flat /= extent;
  }
  return index;
}

/// The derivative of the loss by one element, of fourth order. The step is exact in f32.
double difference_quotient(GradientCall& call, Tensor Inputs::*tensor, const Shape& index) {
  constexpr double kStep = 0x1p-9;
  Tensor& t = call.inputs.*tensor;
  const double x = t.at(index);
  const auto loss_at = [&](double offset) {
    t.set(index, x + offset);
    return call.loss();
  };
  const double near = loss_at(kStep) - loss_at(-kStep);
  const double far = loss_at(2 * kStep) - loss_at(-2 * kStep);
  t.set(index, x);
  return (8 * near - far) / (12 * kStep);
}

void expect_derivatives(Random& random, GradientCall& call, Tensor Inputs::*tensor,
                        const std::vector<double>& got, const char* name) {
  if (!(call.inputs.*tensor).given() || got.empty()) return;
  for (int n = 0; n < 6; ++n) {
    const auto flat = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(got.size())));
    const double want = difference_quotient(call, tensor, unravel(call.inputs.*tensor, flat));
    EXPECT_NEAR(got[flat], want, 2e-8 * (1 + std::fabs(want))) << name << "[" << flat << "]";
  }
}

void expect_derivatives(Random& random, GradientCall& call) {
  const reference::GradientOracle g = call.backward();
  expect_derivatives(random, call, &Inputs::q, g.dq.value, "dq");
  expect_derivatives(random, call, &Inputs::k, g.dk.value, "dk");
  expect_derivatives(random, call, &Inputs::v, g.dv.value, "dv");
  expect_derivatives(random, call, &Inputs::bias, g.dbias.value, "dbias");
  expect_derivatives(random, call, &Inputs::sinks, g.dsinks.value, "dsinks");
  expect_derivatives(random, call, &Inputs::alibi_slopes, g.dslopes, "dslopes");
}

/// Rounds to multiples of 2^-10, so that steps of f32 tensors are exact.
void make_steps_exact(Tensor& t) {
  if (!t.given()) return;
  for (std::size_t i = 0; i < t.values().size(); ++i) {
    const Shape index = unravel(t, i);
    t.set(index, std::round(t.at(index) * 1024) / 1024);
  }
}

Sizes small_sizes(Random& random) {
  Sizes s;
  s.batch = random.between(1, 3);
  s.kv_heads = random.between(1, 2);
  s.q_heads = s.kv_heads * random.between(1, 3);
  s.q_len = random.between(1, 5);
  s.kv_len = random.between(1, 6);
  s.head_dim = random.between(1, 4);
  s.v_dim = random.between(1, 4);
  return s;
}

TEST(GradientOracle, AgreesWithFiniteDifferencesUnderAllOptions) {
  Random random(11);
  const KernelInfo& kernel = *find_kernel("fwd_generic_f64");
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE(round);
    const Sizes sizes = small_sizes(random);
    Inputs inputs = draw_inputs(random, kernel, sizes);
    add_score_options(random, inputs);
    add_masks(random, inputs);
    if (random.chance(0.3)) {
      std::vector<std::int64_t> used;
      for (std::int64_t b = 0; b < sizes.batch; ++b)
        used.push_back(random.between(0, sizes.kv_len));
      inputs.used_k = ints(used);
    }
    if (random.chance(0.3))
      inputs.q_start = ints(
          std::vector<std::int64_t>(static_cast<std::size_t>(sizes.batch), random.between(-2, 6)));
    if (random.chance(0.3))
      inputs.k_start = ints(
          std::vector<std::int64_t>(static_cast<std::size_t>(sizes.batch), random.between(-2, 3)));
    inputs.options.partial = random.chance(0.2);
    for (Tensor Inputs::*t : {&Inputs::bias, &Inputs::sinks, &Inputs::alibi_slopes}) {
      make_steps_exact(inputs.*t);
    }
    GradientCall call = gradient_call(random, std::move(inputs), random.chance(0.5));
    expect_derivatives(random, call);
  }
}

TEST(GradientOracle, AgreesWithFiniteDifferencesOfVarlenCalls) {
  Random random(12);
  for (int round = 0; round < 10; ++round) {
    SCOPED_TRACE(round);
    Inputs inputs;
    inputs.q = draw_normal(random, DType::f64, {7, 4, 3});
    inputs.k = draw_normal(random, DType::f64, {9, 2, 3});
    inputs.v = draw_normal(random, DType::f64, {9, 2, 2});
    inputs.cu_seqlens_q = ints({0, 3, 3, 7});
    inputs.cu_seqlens_k = ints({0, 4, 6, 9});
    inputs.options.causal = random.chance(0.5);
    GradientCall call = gradient_call(random, std::move(inputs), random.chance(0.5));
    expect_derivatives(random, call);
  }
}

TEST(GradientOracle, RowsWithoutKeysContributeNothing) {
  Random random(13);
  Inputs inputs = draw_inputs(random, *find_kernel("fwd_generic_f64"),
                              {.batch = 1, .q_len = 5, .kv_len = 3, .head_dim = 4, .v_dim = 4});
  inputs.options.causal = true;  // rows 0 and 1 see no key
  GradientCall call = gradient_call(random, inputs, true);
  const reference::GradientOracle want = call.backward();
  for (const std::int64_t i : {0, 1}) {
    for (std::int64_t d = 0; d < 4; ++d) {
      call.dout.set({0, 0, i, d}, kNan);
      call.inputs.q.set({0, 0, i, d}, kNan);
    }
    call.dlse.set({0, 0, i}, kNan);
  }
  const reference::GradientOracle got = call.backward();
  EXPECT_EQ(got.dq.value, want.dq.value);
  EXPECT_EQ(got.dk.value, want.dk.value);
  EXPECT_EQ(got.dv.value, want.dv.value);
  for (std::size_t d = 0; d < 8; ++d) EXPECT_EQ(got.dq.value[d], 0.0);
}

TEST(GradientOracle, RowsOfDsSumToDlse) {
  Random random(14);
  Inputs inputs = draw_inputs(random, *find_kernel("fwd_generic_f64"),
                              {.batch = 2, .q_heads = 2, .kv_heads = 1, .q_len = 4, .kv_len = 6});
  const GradientCall call = gradient_call(random, inputs, true);
  const reference::GradientOracle g = call.backward();
  const std::vector<double> dlse = call.dlse.values();
  for (std::size_t r = 0; r < g.ds.size(); ++r) {
    double sum = 0;
    for (const double x : g.ds[r]) sum += x;
    EXPECT_NEAR(sum, dlse[r], 1e-12);
  }
}

/// Roundings of dS have related signs where a large dlse makes the dS of a row nearly equal.
TEST(GradientOracle, NearlyEqualDsHaveATermOfTheBound) {
  Random random(15);
  Inputs inputs =
      draw_inputs(random, *find_kernel("fwd_generic_f64"),
                  {.batch = 1, .q_heads = 1, .kv_heads = 1, .q_len = 4, .kv_len = 9}, 0.01);
  GradientCall call = gradient_call(random, inputs, true);
  for (const double x : call.backward().dq.alike) EXPECT_EQ(x, 0.0);
  for (std::int64_t row = 0; row < 4; ++row) call.dlse.set({0, 0, row}, 1e4);
  const reference::GradientOracle g = call.backward();
  for (std::size_t i = 0; i < g.dq.alike.size(); ++i) {
    EXPECT_GE(g.dq.alike[i], std::fabs(g.dq.value[i]));
  }
}

}  // namespace
}  // namespace flashcore::test
