// cost() against a brute-force count of visible pairs and the sum of the tensors' bytes.
#include <gtest/gtest.h>

#include "flashcore/plan.h"
#include "support/call.h"
#include "support/draw.h"

namespace flashcore {
namespace {

double count_pairs(const Problem& p) {
  const Options& o = p.options;
  double pairs = 0;
  for (std::int64_t i = 0; i < p.q_len; ++i) {
    const std::int64_t position = p.kv_len - p.q_len + i;
    for (std::int64_t j = 0; j < p.kv_len; ++j) {
      if (o.causal && j > position) continue;
      if (o.window_left >= 0 && j < position - o.window_left) continue;
      if (o.window_right >= 0 && j > position + o.window_right) continue;
      pairs += 1;
    }
  }
  return pairs * static_cast<double>(p.batch * p.q_heads);
}

TEST(Cost, CountsVisiblePairs) {
  for (std::int64_t q_len = 0; q_len <= 9; ++q_len) {
    for (std::int64_t kv_len = 0; kv_len <= 9; ++kv_len) {
      for (const std::int64_t left : {-1, 0, 1, 4, 20}) {
        for (const std::int64_t right : {-1, 0, 2, 20}) {
          for (const bool causal : {false, true}) {
            Options options;
            options.window_left = left;
            options.window_right = right;
            options.causal = causal;
            const Problem p = *dense_problem(DType::f16, 3, 4, 2, q_len, kv_len, 16, 24, options);
            const Cost c = cost(p);
            ASSERT_EQ(c.visible_pairs, count_pairs(p))
                << q_len << " x " << kv_len << " window " << left << ", " << right;
            ASSERT_EQ(c.flops, 2.0 * (16 + 24) * c.visible_pairs);
          }
        }
      }
    }
  }
}

TEST(Cost, LargeCountsAreExact) {
  Options options;
  options.causal = true;
  const std::int64_t n = 1 << 20;
  const Problem p = *dense_problem(DType::f16, 1, 1, 1, n, n, 64, 64, options);
  EXPECT_EQ(cost(p).visible_pairs, 0.5 * static_cast<double>(n) * static_cast<double>(n + 1));
}

double bytes_of(const test::Tensor& t) {
  double bytes = static_cast<double>(size_of(t.dtype()));
  for (const std::int64_t extent : t.shape()) bytes *= static_cast<double>(extent);
  return bytes;
}

TEST(Cost, EveryTensorIsReadOrWrittenOnce) {
  verify::Random random(6);
  const auto kernels = test::runnable_kernels();
  for (int n = 0; n < 200; ++n) {
    const KernelInfo& kernel = *kernels[static_cast<std::size_t>(n) % kernels.size()];
    test::Inputs inputs = test::draw_call(random, kernel);
    test::Output output = test::make_output(inputs);
    if (random.chance(0.3)) output.lse = {};
    const Result<Problem> problem =
        make_problem(test::tensors_of(inputs, output.out, output.lse), inputs.options);
    ASSERT_TRUE(problem.ok()) << problem.status().message();
    double bytes =
        bytes_of(inputs.q) + bytes_of(inputs.k) + bytes_of(inputs.v) + bytes_of(output.out);
    for (const test::Tensor* t : {&inputs.bias, &inputs.mask, &output.lse}) {
      if (t->given()) bytes += bytes_of(*t);
    }
    ASSERT_DOUBLE_EQ(cost(*problem).bytes, bytes) << "draw " << n;
  }
}

}  // namespace
}  // namespace flashcore
