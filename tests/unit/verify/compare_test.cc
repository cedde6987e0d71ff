// compare() rejects every injected fault and accepts correct results.
#include "verify/inputs/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "unit/verify/judged.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr DType kTypes[] = {DType::f64, DType::f32, DType::f16, DType::bf16};
constexpr double kSigmas[] = {0.01, 1.0, 10.0};

void expect_rejected(const Judged& judged, const char* reason) {
  const verify::Comparison c = judged.compare();
  EXPECT_FALSE(c.ok);
  EXPECT_NE(c.reason.find(reason), std::string::npos) << c.reason;
}

/// Calls body(judged) for every dtype and every standard deviation of the inputs.
template <typename Body>
void for_each_kind(Body body) {
  for (const DType dtype : kTypes) {
    for (const double sigma : kSigmas) {
      SCOPED_TRACE(std::string(to_string(dtype)) + " sigma " + std::to_string(sigma));
      Judged judged(default_inputs(1, dtype, sigma));
      ASSERT_TRUE(judged.compare().ok) << verify::report(judged.compare());
      body(judged);
    }
  }
}

TEST(CompareRejects, NanAndInfinity) {
  for (const double bad : {kNan, kInfinity, -kInfinity}) {
    for_each_kind([&](Judged& judged) {
      judged.output.out.set({1, 3, 5, 15}, bad);
      expect_rejected(judged, "non-finite");
      EXPECT_EQ(judged.compare().non_finite, 1);
    });
    for_each_kind([&](Judged& judged) {
      judged.output.lse.set({0, 2, 3}, bad);
      expect_rejected(judged, "non-finite");
      EXPECT_EQ(judged.compare().worst.column, -1);
    });
  }
}

TEST(CompareRejects, AScaledOutput) {
  for (const double sigma : kSigmas) {
    for (const double factor : {1.001, 0.999}) {
      Judged judged(default_inputs(2, DType::f32, sigma));
      Tensor& out = judged.output.out;
      for (const reference::RowId& r : judged.oracle.rows) {
        for (std::int64_t c = 0; c < 16; ++c) {
          out.set({r.b, r.h, r.i, c}, factor * out.at({r.b, r.h, r.i, c}));
        }
      }
      expect_rejected(judged, "exceed");
    }
  }
}

TEST(CompareRejects, AZeroOutput) {
  for_each_kind([](Judged& judged) {
    judged.output.out.fill(0.0);
    expect_rejected(judged, "exceed");
  });
}

TEST(CompareRejects, OneWrongElementInAMillion) {
  Random random(3);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const std::string kernel = std::string("fwd_generic_") + to_string(dtype);
    Inputs inputs = draw_inputs(random, *find_kernel(kernel.c_str()),
                                {.batch = 1,
                                 .q_heads = 8,
                                 .kv_heads = 8,
                                 .q_len = 1000,
                                 .kv_len = 8,
                                 .head_dim = 4,
                                 .v_dim = 128});
    inputs.options.kernel = nullptr;
    Judged judged(inputs);
    verify::Comparison c = judged.compare();
    ASSERT_TRUE(c.ok) << verify::report(c);
    ASSERT_GE(c.elements, 1'000'000);
    for (const Shape& index : {Shape{0, 0, 0, 0}, Shape{0, 7, 999, 127}, Shape{0, 3, 500, 64}}) {
      const double correct = judged.output.out.at(index);
      judged.output.out.set(index, correct * 1.05 + 0.01);
      c = judged.compare();
      EXPECT_FALSE(c.ok);
      EXPECT_EQ(c.over_bound, 1);
      EXPECT_EQ(c.worst.row,
                (reference::RowId{0, static_cast<int>(index[1]), static_cast<int>(index[2])}));
      EXPECT_EQ(c.worst.column, index[3]);
      judged.output.out.set(index, correct);
    }
  }
}

TEST(CompareRejects, AnUnwrittenRowOrElement) {
  for_each_kind([](Judged& judged) {
    const DType dtype = judged.output.out.dtype();
    std::vector<std::uint64_t> bits = judged.output.out.bits();
    bits[37] = verify::poison(dtype);
    judged.output.out.set_bits(bits);
    expect_rejected(judged, "never written");
    EXPECT_EQ(judged.compare().unwritten, 1);
    for (std::size_t i = 96; i < 112; ++i) bits[i] = verify::poison(dtype);
    judged.output.out.set_bits(bits);
    EXPECT_EQ(judged.compare().unwritten, 17);
  });
  for_each_kind([](Judged& judged) {
    std::vector<std::uint64_t> bits = judged.output.lse.bits();
    bits[0] = verify::poison(judged.output.lse.dtype());
    judged.output.lse.set_bits(bits);
    expect_rejected(judged, "never written");
  });
}

TEST(CompareRejects, AnUnwrittenElementOfARowThatIsNan) {
  Inputs inputs = default_inputs(4);
  for (std::int64_t d = 0; d < 16; ++d) inputs.q.set({0, 0, 2, d}, kNan);
  Judged judged(inputs);
  EXPECT_TRUE(judged.compare().ok) << verify::report(judged.compare());
  std::vector<std::uint64_t> bits = judged.output.out.bits();
  bits[2 * 16] = verify::poison(DType::f32);
  judged.output.out.set_bits(bits);
  expect_rejected(judged, "never written");
}

TEST(CompareRejects, AnLseInBaseTwo) {
  for_each_kind([](Judged& judged) {
    for (const reference::RowId& r : judged.oracle.rows) {
      judged.output.lse.set({r.b, r.h, r.i}, judged.output.lse.at({r.b, r.h, r.i}) / std::log(2.0));
    }
    expect_rejected(judged, "exceed");
  });
}

TEST(CompareRejects, OneDroppedKeyOf2048) {
  for (const DType dtype : kTypes) {
    for (const double sigma : {0.01, 1.0}) {
      for (const std::int64_t dropped : {0, 1000, 2047}) {
        SCOPED_TRACE(std::string(to_string(dtype)) + " sigma " + std::to_string(sigma));
        Judged judged(default_inputs(static_cast<std::uint64_t>(dropped) + 5, dtype, sigma, 2048));
        ASSERT_TRUE(judged.compare().ok);
        Inputs without = judged.inputs;
        without.mask = Tensor(DType::boolean, {1, 1, 1, 2048});
        without.mask.fill(1);
        without.mask.set({0, 0, 0, dropped}, 0);
        const Judged wrong(without);
        Judged out_only = judged;
        out_only.output.out = wrong.output.out;
        EXPECT_FALSE(out_only.compare().ok);
        Judged lse_only = judged;
        lse_only.output.lse = wrong.output.lse;
        EXPECT_FALSE(lse_only.compare().ok);
      }
    }
  }
}

TEST(CompareRejects, SwappedHeadsRowsAndColumns) {
  for_each_kind([](Judged& judged) {
    const Tensor correct = judged.output.out;
    judged.output.out = take(correct, 1, {2, 1, 0, 3});
    expect_rejected(judged, "exceed");
    std::vector<std::int64_t> columns = range(0, 16);
    std::swap(columns[14], columns[15]);
    judged.output.out = take(correct, 3, columns);
    expect_rejected(judged, "exceed");
    judged.output.out = take(correct, 0, {1, 0});
    expect_rejected(judged, "exceed");
  });
  // Rows over the same keys differ only in their scores. At sigma 0.01 bf16 rounds those to the
  // same output.
  for (const DType dtype : kTypes) {
    Judged judged(default_inputs(1, dtype, 1.0));
    const Tensor correct = judged.output.out;
    judged.output.out = take(correct, 2, {0, 1, 3, 2, 4, 5});
    expect_rejected(judged, "exceed");
    judged.output.out = take(correct, 1, {1, 0, 2, 3});
    expect_rejected(judged, "exceed");
  }
}

TEST(CompareRejects, AHeadWithASystematicErrorWithinItsBounds) {
  for (const DType dtype : kTypes) {
    // A wide output, whose rounding is negligible against the injected error.
    Judged judged(default_inputs(1, dtype), wide(dtype));
    for (std::size_t r = 0; r < judged.oracle.rows.size(); ++r) {
      const auto [b, h, i] = judged.oracle.rows[r];
      if (h != 2) continue;
      for (std::size_t c = 0; c < 16; ++c) {
        const double bound = verify::out_bound(judged.oracle, r, c, judged.arithmetic);
        judged.output.out.set({b, h, i, static_cast<std::int64_t>(c)},
                              judged.oracle.out[r * 16 + c] + 0.7 * bound);
      }
    }
    const verify::Comparison c = judged.compare();
    EXPECT_EQ(c.over_bound, 0) << to_string(dtype);
    expect_rejected(judged, "RMS error of a head");
    EXPECT_GT(c.bias, 0);
  }
}

TEST(CompareRejects, RowsWithoutKeysUnlessZeroAndMinusInfinity) {
  Inputs inputs = default_inputs(6);
  inputs.used_k = ints({40, 0});
  const Judged correct(inputs);
  ASSERT_TRUE(correct.compare().ok) << verify::report(correct.compare());
  Judged judged = correct;
  judged.output.out.set({1, 0, 0, 0}, 1e-30);
  expect_rejected(judged, "exceed");
  judged = correct;
  judged.output.lse.set({1, 0, 0}, -1e30);
  expect_rejected(judged, "non-finite");
  judged = correct;
  judged.output.lse.set({1, 0, 0}, kNan);
  expect_rejected(judged, "non-finite");
  judged = correct;
  judged.output.lse.set({0, 0, 0}, -kInfinity);
  expect_rejected(judged, "non-finite");
}

TEST(CompareRejects, ALostNan) {
  Inputs inputs = default_inputs(7);
  inputs.k.set({0, 1, 5, 0}, kNan);  // seen by every row of heads 2 and 3
  Judged judged(inputs);
  EXPECT_TRUE(judged.compare().ok);
  judged.output.out.set({0, 2, 0, 0}, 0.25);
  expect_rejected(judged, "non-finite");
  judged = Judged(inputs);
  judged.output.lse.set({0, 3, 1}, 0.25);
  expect_rejected(judged, "non-finite");
  judged = Judged(inputs);
  judged.output.lse.set({0, 3, 1}, -kInfinity);  // would mean a row without keys
  expect_rejected(judged, "non-finite");
}

TEST(Compare, AHiddenNanAllowsNanButNoWrongNumber) {
  Inputs inputs = default_inputs(8);
  inputs.options.causal = true;
  inputs.v.set({0, 0, 39, 3}, kNan);  // only the last query sees it
  Judged judged(inputs);
  EXPECT_TRUE(judged.compare().ok);
  judged.output.out.set({0, 0, 0, 3}, kNan);
  EXPECT_TRUE(judged.compare().ok) << verify::report(judged.compare());
  judged.output.out.set({0, 0, 0, 2}, judged.output.out.at({0, 0, 0, 2}) + 0.01);
  EXPECT_FALSE(judged.compare().ok);
  judged = Judged(inputs);
  judged.output.lse.set({0, 0, 0}, kNan);
  EXPECT_FALSE(judged.compare().ok);
  judged = Judged(inputs);
  judged.output.out.set({0, 2, 0, 3}, kNan);  // the hidden NaN is in another KV head
  EXPECT_FALSE(judged.compare().ok);
}

TEST(Compare, ValuesAtTheLimitOfTheFormatMayOverflow) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    Inputs inputs = default_inputs(9, dtype);
    const double largest = dtype == DType::f16    ? 65504.0
                           : dtype == DType::bf16 ? 0x1p128 - 0x1p120
                                                  : 0x1p128 - 0x1p104;
    inputs.v.fill(largest);
    Judged judged(inputs);
    EXPECT_TRUE(judged.compare().ok) << verify::report(judged.compare());
    judged.output.out.set({0, 0, 0, 0}, -kInfinity);
    EXPECT_TRUE(judged.compare().ok) << "the sign of an infinity is not compared";
    inputs.v.fill(0.9 * largest);
    judged = Judged(inputs);
    judged.output.out.set({0, 0, 0, 0}, kInfinity);
    EXPECT_FALSE(judged.compare().ok);
    judged.output.out.set({0, 0, 0, 0}, largest);
    EXPECT_FALSE(judged.compare().ok);
  }
}

TEST(Compare, ReportsCountsAndErrors) {
  Judged judged(default_inputs(10));
  const Tensor correct = judged.output.out;
  const Shape at[] = {{0, 1, 2, 3}, {1, 2, 3, 4}};
  judged.output.out.set(at[0], correct.at(at[0]) + 1.0);
  judged.output.out.set(at[1], correct.at(at[1]) - 3.0);
  const verify::Comparison c = judged.compare();
  EXPECT_EQ(c.elements, 2 * 4 * 6 * 16);
  EXPECT_EQ(c.over_bound, 2);
  EXPECT_NEAR(c.max_error, 3.0, 1e-6);
  EXPECT_NEAR(c.bias, -2.0 / static_cast<double>(c.elements), 1e-7);
  EXPECT_NEAR(c.mean_error, 4.0 / static_cast<double>(c.elements), 1e-7);
  EXPECT_EQ(c.worst.row, (reference::RowId{1, 2, 3}));
  EXPECT_EQ(c.worst.column, 4);
  EXPECT_EQ(c.samples.size(), 5u);
  double squares = 0;
  for (const double x : judged.oracle.out) squares += x * x;
  EXPECT_NEAR(c.relative_error, std::sqrt(10.0 / squares), 1e-5);
  EXPECT_GE(c.sign_flips, 1);
  const std::string text = verify::report(c);
  for (const char* word : {"out[b=1, h=2, i=3, c=4]", "over bound 2", "sign flips", "sample"}) {
    EXPECT_NE(text.find(word), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace flashcore::test
