// The bounds of what tensor cores cut, against their sums.
#include "reference/cut_sums.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "emulator/instructions/tensor_core.h"
#include "support/backward.h"
#include "unit/verify/judged.h"
#include "verify/inputs/case_memory.h"
#include "verify/inputs/compare_bwd.h"

namespace flashcore::test {
namespace {

using emulator::TensorCore;
using emulator::TensorFormat;

constexpr double kUnit = 0x1p-24;
constexpr int kMostProducts = 256;

constexpr TensorCore core_of(int compute_capability, DType dtype) {
  const TensorFormat format = dtype == DType::f16 ? TensorFormat::f16 : TensorFormat::bf16;
  return emulator::tensor_core(compute_capability, format, format);
}
constexpr std::array<int, 2> kDevices{80, 90};

/// The sum of products as a tensor core finds it.
float tensor_core_sum(const TensorCore& core, const std::vector<double>& a,
                      const std::vector<double>& b) {
  static thread_local float left[kMostProducts][16], right[kMostProducts][1], sum[16][1];
  for (std::size_t k = 0; k < a.size(); ++k) {
    left[k][0] = static_cast<float>(a[k]);
    right[k][0] = static_cast<float>(b[k]);
  }
  sum[0][0] = 0;
  emulator::add_products(core, static_cast<int>(a.size()), 1, left, right, sum);
  return sum[0][0];
}

double exact_sum(const std::vector<double>& a, const std::vector<double>& b) {
  long double sum = 0;
  for (std::size_t k = 0; k < a.size(); ++k) sum += static_cast<long double>(a[k]) * b[k];
  return static_cast<double>(sum);
}

double cut_bound(const std::vector<double>& a, const std::vector<double>& b, DType dtype) {
  const reference::Factors x(a, dtype);
  reference::FactorPanels y;
  y.reset(b.size(), 1);
  for (std::size_t k = 0; k < b.size(); ++k) y.set(k, 0, reference::factor_of(b[k], dtype));
  double bounds[reference::kPanel];
  reference::cut_sums(x, y, 0, bounds);
  return kUnit * bounds[0];
}

/// The part of the bound that a tensor core cuts.
double share_cut(int device, DType dtype, const std::vector<double>& a,
                 const std::vector<double>& b) {
  const double error = tensor_core_sum(core_of(device, dtype), a, b) - exact_sum(a, b);
  return error == 0 ? 0 : std::fabs(error) / cut_bound(a, b, dtype);
}

/// Normal numbers in a 16-bit format. The sizes of a factor's elements differ by up to 2^spread.
std::vector<double> draw_factor(Random& random, DType dtype, std::int64_t count, double size,
                                std::int64_t spread, bool positive) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < count; ++i) {
    const double x =
        size * random.normal() * std::ldexp(1.0, -static_cast<int>(random.below(spread + 1)));
    values.push_back(positive ? std::fabs(x) : x);
  }
  return tensor_of(dtype, {count}, values).values();
}

TEST(CutSums, BoundTensorCores) {
  Random random(51);
  int cut = 0;
  for (int round = 0; round < rounds(4000); ++round) {
    const DType dtype = random.chance(0.5) ? DType::f16 : DType::bf16;
    static constexpr std::int64_t kCounts[] = {1, 2, 7, 8, 9, 16, 17, 40, 64, 128, 250, 256};
    static constexpr double kSizes[] = {1e-7, 1e-6, 1e-4, 0.01, 1, 10, 100};
    const std::int64_t count = random.pick(kCounts), spread = random.below(16);
    const bool positive = random.chance(0.5);
    const auto a = draw_factor(random, dtype, count, random.pick(kSizes), spread, positive);
    const auto b = draw_factor(random, dtype, count, random.pick(kSizes), spread, positive);
    for (const int device : kDevices) {
      const double share = share_cut(device, dtype, a, b);
      ASSERT_LE(share, 1) << "sm_" << device << ", " << count << " products";
      cut += share > 0 ? 1 : 0;
    }
  }
  EXPECT_GT(cut, rounds(4000) / 4);
}

// A bound far above every sum would hide wrong results.
TEST(CutSums, AreCloseToWhatTensorCoresCut) {
  Random random(52);
  const auto worst = [&](bool positive, double size) {
    double share = 0;
    for (int round = 0; round < 200; ++round) {
      const auto a = draw_factor(random, DType::f16, 256, size, 0, positive);
      const auto b = draw_factor(random, DType::f16, 256, 1, 0, positive);
      share = std::max(share, share_cut(80, DType::f16, a, b));
    }
    return share;
  };
  EXPECT_GT(worst(true, 1), 0.3);
  EXPECT_GT(worst(false, 1), 0.1);
  EXPECT_GT(worst(false, 1e-6), 0.1);
}

TEST(CutSums, ByHand) {
  const auto units = [](const std::vector<double>& a, const std::vector<double>& b,
                        DType dtype = DType::f16) { return cut_bound(a, b, dtype) / kUnit; };
  // Sums whose bits are near lose those of the result, as of any sum: 2u of 8, which 15 reaches.
  EXPECT_EQ(units({3}, {5}), 2 * 8);
  EXPECT_EQ(units({3, 0, 0}, {5, 1, 7}), 2 * 8);
  EXPECT_EQ(units({1, 1}, {1, 1}), 2 * 2);
  EXPECT_EQ(units({1, 0x1p-30}, {1, 1}, DType::bf16), 2 * 1 + 0x1p-6);  // all of the product
  // 0x1.004p-8 squared is a multiple of 2^-36: it loses a unit of the largest less 2^-36.
  EXPECT_EQ(units({1, 0x1.004p-8}, {1, 0x1.004p-8}), 2 * 1 + (1 - 0x1p-12));
  // Losses of other signs cancel: the larger one counts.
  EXPECT_EQ(units({1, -0x1p-30, 0x1p-28}, {1, 1, 1}, DType::bf16), 2 * 1 + 0x1p-4);
  // Subnormal factors are aligned as 2^-14.
  EXPECT_EQ(units({0x1p-24, 0x1p-24}, {64, 0x1p-10}), 2 * 0x1p-18 + 0x1p-10);
  EXPECT_EQ(units({0x1p-24, 0x1p-24}, {64, 0x1p-10}, DType::bf16), 2 * 0x1p-18);
  // The sum of the first eight is cut beside the ninth product, to which all are aligned.
  std::vector<double> a(9, 0x1p-30), b(9, 1);
  a.back() = 1;
  EXPECT_EQ(units(a, b, DType::bf16), 8 * 0x1p-6 + 2 * 0x1p-27 + 2 * 1 + (1 - 2 * 0x1p-27));
}

// Scores near 700 whose products all have one sign, as tensor cores add them.
TEST(CutSums, AreInTheBoundOfScores) {
  Random random(53);
  double worst = 0;
  for (int round = 0; round < 40; ++round) {
    Inputs inputs;
    inputs.q = draw_normal(random, DType::f16, {1, 1, 1, 256});
    inputs.k = draw_normal(random, DType::f16, {1, 1, 1, 256});
    inputs.v = draw_normal(random, DType::f16, {1, 1, 1, 8});
    for (Tensor* t : {&inputs.q, &inputs.k}) {
      for (std::int64_t d = 0; d < 256; ++d)
        t->set({0, 0, 0, d}, 4 * std::fabs(t->at({0, 0, 0, d})));
    }
    const Judged judged(inputs);
    const auto arithmetic = verify::arithmetic_of(DType::f16, DType::f16);
    const double bound = verify::score_bound(judged.oracle, 0, arithmetic);
    for (const int device : kDevices) {
      const double sum =
          tensor_core_sum(core_of(device, DType::f16), inputs.q.values(), inputs.k.values());
      const double error = std::fabs(sum / 16 - judged.oracle.lse[0]);
      ASSERT_LE(error, bound) << "sm_" << device;
      worst = std::max(worst, error / judged.oracle.magnitude[0]);
    }
    EXPECT_LT(bound, kUnit * 200 * judged.oracle.magnitude[0]);
  }
  EXPECT_GT(worst, kUnit * 40);  // a walk of 256 steps has at most 16
}

/// Queries that see one key: P is 1, out is v, and the gradients of q and k are 0.
struct OneKey {
  static constexpr std::int64_t kRows = 32, kDim = 16;
  Differentiated call;
  double scale = 0.3;

  OneKey(Random& random, DType dtype, double dout_size, double softcap) {
    Inputs& inputs = call.inputs;
    inputs.q = draw_normal(random, dtype, {1, 1, kRows, kDim}, 10);
    inputs.k = draw_normal(random, dtype, {1, 1, 1, kDim}, 10);
    inputs.v = draw_normal(random, dtype, {1, 1, 1, kDim}, 10);
    inputs.options.scale = scale;
    inputs.options.softcap = softcap;
    Judged judged(inputs);
    call.out = judged.output.out;
    call.lse = judged.output.lse;
    call.dout = draw_normal(random, dtype, {1, 1, kRows, kDim}, dout_size);
    call.dq = Tensor(DType::f32, {1, 1, kRows, kDim});
    call.dk = Tensor(DType::f32, {1, 1, 1, kDim});
    call.dv = Tensor(DType::f32, {1, 1, 1, kDim});
  }

  std::vector<double> row(const Tensor& t, std::int64_t i) const {
    std::vector<double> values;
    for (std::int64_t d = 0; d < kDim; ++d) values.push_back(t.at({0, 0, i, d}));
    return values;
  }
  /// Stores the gradients of exact arithmetic, but for dP, which dp(dout, v) returns.
  template <typename Dp>
  void store(Dp dp) {
    const std::vector<double> k = row(call.inputs.k, 0), v = row(call.inputs.v, 0);
    std::vector<double> dk(kDim), dv(kDim);
    for (std::int64_t i = 0; i < kRows; ++i) {
      const std::vector<double> q = row(call.inputs.q, i), dout = row(call.dout, i);
      double slope = 1;
      if (call.inputs.options.softcap > 0) {
        const double t = std::tanh(scale * exact_sum(q, k) / call.inputs.options.softcap);
        slope = 1 - t * t;
      }
      const double dz = (dp(dout, v) - exact_sum(dout, v)) * slope;
      for (std::size_t d = 0; d < kDim; ++d) {
        call.dq.set({0, 0, i, static_cast<std::int64_t>(d)}, scale * dz * k[d]);
        dk[d] += scale * dz * q[d];
        dv[d] += dout[d];
      }
    }
    for (std::size_t d = 0; d < kDim; ++d) {
      call.dk.set({0, 0, 0, static_cast<std::int64_t>(d)}, dk[d]);
      call.dv.set({0, 0, 0, static_cast<std::int64_t>(d)}, dv[d]);
    }
  }
  verify::Comparison compare(bool tensor_cores) const {
    const Tensors tensors = call.tensors();
    const Problem problem = *make_problem(tensors, call.inputs.options);
    return verify::compare_gradients(
        reference::compute_gradients(problem, tensors, call.gradients(), {kUnit, tensor_cores}),
        call.gradients(), call.inputs.q.dtype());
  }
};

// Small factors of f16 are subnormal and aligned as 2^-14: products lose more than a unit in the
// last place of the largest one each, the bound of earlier versions.
TEST(CutSums, OfSubnormalFactorsExceedTheLargestProduct) {
  Random random(54);
  for (const int device : kDevices) {
    double worst = 0;
    for (int round = 0; round < 200; ++round) {
      const auto a = draw_factor(random, DType::f16, 16, 1e-6, 0, false);
      const auto b = draw_factor(random, DType::f16, 16, 10, 0, false);
      double magnitude = 0, largest = 0;
      for (std::size_t k = 0; k < a.size(); ++k) {
        magnitude += std::fabs(a[k] * b[k]);
        largest = std::max(largest, std::fabs(a[k] * b[k]));
      }
      const double error =
          std::fabs(tensor_core_sum(core_of(device, DType::f16), a, b) - exact_sum(a, b));
      worst = std::max(worst, error / (kUnit * (2 * magnitude + 2 * 16 * largest)));
    }
    EXPECT_GT(worst, 1) << "sm_" << device;
  }
}

TEST(CutSums, AreInTheBoundOfGradients) {
  Random random(55);
  int rejected_without = 0;
  double worst = 0;
  for (int round = 0; round < 20; ++round) {
    for (const double softcap : {0.0, 50.0}) {
      OneKey problem(random, DType::f16, 1e-6, softcap);
      for (const int device : kDevices) {
        const TensorCore core = core_of(device, DType::f16);
        problem.store([&](const auto& a, const auto& b) { return tensor_core_sum(core, a, b); });
        const verify::Comparison judged = problem.compare(true);
        ASSERT_TRUE(judged.ok) << verify::report(judged);
        worst = std::max(worst, judged.worst_ratio);
        rejected_without += problem.compare(false).ok ? 0 : 1;
      }
    }
  }
  EXPECT_GT(rejected_without, 5);  // of 80
  EXPECT_GT(worst, 0.25);          // the bound is not far above the error
}

TEST(CutSums, LeaveWrongGradientsVisible) {
  Random random(56);
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const double dout_size : {1e-6, 1.0}) {
      OneKey problem(random, dtype, dout_size, 50);
      const auto expect_wrong = [&](const char* what, auto dp) {
        problem.store(dp);
        EXPECT_FALSE(problem.compare(true).ok) << what << ", " << to_string(dtype);
      };
      expect_wrong("a product missing", [](const auto& a, const auto& b) {
        return exact_sum(a, b) - a.back() * b.back();
      });
      expect_wrong("dP in the format of the inputs", [&](const auto& a, const auto& b) {
        return tensor_of(dtype, {1}, {exact_sum(a, b)}).at({0});
      });
      expect_wrong("a sum of f16 with fewer bits", [](const auto& a, const auto& b) {
        return tensor_core_sum({16, 13, 13, -14, -14}, a, b);
      });
    }
  }
}

}  // namespace
}  // namespace flashcore::test
