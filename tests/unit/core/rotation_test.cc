// The rotation of quantize() and dequantize() against its definition, a matrix in f64.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "core/rotation.h"
#include "flashcore/flashcore.h"
#include "flashcore/quant.h"
#include "support/draw.h"
#include "support/tensor.h"
#include "unit/api/quantized.h"

namespace flashcore::test {
namespace {

using Row = std::vector<double>;

constexpr std::int64_t kColumns[] = {1, 2, 3, 16, 20, 32, 48, 64, 80, 96, 128, 192, 256, 512, 576};
constexpr double kUnit = 0x1p-24;  // relative error of one rounding to f32

std::int64_t order_of(std::int64_t columns) {
  std::int64_t order = 1;
  while (columns % (2 * order) == 0) order *= 2;
  return order;
}

/// The matrix of flashcore/quant.h, element by element: blocks of `order` rows and columns.
class Matrix {
 public:
  explicit Matrix(std::int64_t columns)
      : order(order_of(columns)), elements_(static_cast<std::size_t>(columns * order)) {
    const double size = 1 / std::sqrt(static_cast<double>(order));
    for (std::int64_t i = 0; i < columns; ++i) {
      int pairs = 0;  // of adjacent 1 bits
      for (std::int64_t bits = i; bits > 1; bits /= 2) pairs += bits % 4 == 3 ? 1 : 0;
      for (std::int64_t j = 0; j < order; ++j) {
        const int signs = pairs + std::popcount(static_cast<std::uint64_t>(i % order & j));
        elements_[static_cast<std::size_t>(i * order + j)] = signs % 2 == 0 ? size : -size;
      }
    }
  }

  /// The `order` nonzero elements of row i. They start at column i / order * order.
  const double* row(std::int64_t i) const {
    return &elements_[static_cast<std::size_t>(i * order)];
  }

  /// x times the matrix, and times its transpose.
  Row times(const Row& x) const {
    Row y(x.size(), 0.0);
    for_each_element(x, [&](std::size_t i, std::size_t j, double m) { y[j] += m * x[i]; });
    return y;
  }
  Row times_transpose(const Row& y) const {
    Row x(y.size(), 0.0);
    for_each_element(y, [&](std::size_t i, std::size_t j, double m) { x[i] += m * y[j]; });
    return x;
  }

  const std::int64_t order;

 private:
  template <typename Visit>
  void for_each_element(const Row& x, Visit visit) const {
    const auto n = static_cast<std::size_t>(order);
    for (std::size_t i = 0; i < x.size(); ++i) {
      for (std::size_t j = 0; j < n; ++j) visit(i, i / n * n + j, elements_[i * n + j]);
    }
  }

  std::vector<double> elements_;
};

/// Error bound of a rotated row in f32: one rounding for each of the log2(order) additions of an
/// element, and one for the factor.
double rotation_error(const Row& x) {
  const auto columns = static_cast<std::int64_t>(x.size());
  const auto order = static_cast<double>(order_of(columns));
  double sum = 0;
  for (const double one : x) sum += std::fabs(one);
  return (std::log2(order) + 3) * kUnit * sum / std::sqrt(order);
}

Row row_of(const Tensor& tensor, Shape at) {
  Row row;
  for (at[3] = 0; at[3] < tensor.size(3); ++at[3]) row.push_back(tensor.at(at));
  return row;
}

template <typename Visit>
void for_each_row(const Shape& shape, Visit visit) {
  for_each_index({shape[0], shape[1], shape[2], 1}, visit);
}

/// Normal values. One column in 32 is 20 times larger.
Tensor draw_outliers(Random& random, DType dtype, const Shape& shape) {
  Tensor x = draw_normal(random, dtype, shape);
  for_each_index(shape, [&](const Shape& at) {
    if (at[3] % 32 == 5) x.set(at, 20 * x.at(at));
  });
  return x;
}

TEST(Rotation, MatchesTheOrthonormalMatrix) {
  for (const std::int64_t columns : kColumns) {
    SCOPED_TRACE(columns);
    const Matrix matrix(columns);
    for (std::int64_t i = 0; i < columns; ++i) {
      const std::int64_t first = i / matrix.order * matrix.order;
      for (std::int64_t j = first; j < first + matrix.order; ++j) {
        const double dot =
            std::inner_product(matrix.row(i), matrix.row(i) + matrix.order, matrix.row(j), 0.0);
        ASSERT_NEAR(dot, i == j ? 1 : 0, 1e-13);
      }
      std::vector<float> row(static_cast<std::size_t>(columns), 0.f);
      row[static_cast<std::size_t>(i)] = 1;
      core::rotate_row(row.data(), static_cast<std::int32_t>(columns));
      for (std::int64_t j = 0; j < columns; ++j) {
        const bool zero = j < first || j >= first + matrix.order;
        ASSERT_NEAR(static_cast<double>(row[static_cast<std::size_t>(j)]),
                    zero ? 0 : matrix.row(i)[j - first], kUnit);
      }
      core::rotate_row_back(row.data(), static_cast<std::int32_t>(columns));
      for (std::int64_t j = 0; j < columns; ++j) {
        ASSERT_NEAR(static_cast<double>(row[static_cast<std::size_t>(j)]), i == j ? 1 : 0,
                    4 * kUnit);
      }
    }
  }
}

TEST(Rotation, KeepsScores) {
  Random random(3);
  for (const std::int64_t columns : kColumns) {
    SCOPED_TRACE(columns);
    const Shape shape = {1, 1, 8, columns};
    const Tensor q = draw_outliers(random, DType::f32, shape);
    const Tensor k = draw_outliers(random, DType::f32, shape);
    for_each_row(shape, [&](const Shape& at) {
      const Row x = row_of(q, at), y = row_of(k, at);
      std::vector<float> rotated_x(x.begin(), x.end()), rotated_y(y.begin(), y.end());
      core::rotate_row(rotated_x.data(), static_cast<std::int32_t>(columns));
      core::rotate_row(rotated_y.data(), static_cast<std::int32_t>(columns));
      double want = 0, got = 0, allowed = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        want += x[i] * y[i];
        got += static_cast<double>(rotated_x[i]) * static_cast<double>(rotated_y[i]);
        allowed += std::fabs(static_cast<double>(rotated_x[i])) * rotation_error(y) +
                   std::fabs(static_cast<double>(rotated_y[i])) * rotation_error(x);
      }
      ASSERT_LE(std::fabs(got - want), allowed);
    });
  }
}

TEST(Rotation, DistributesOneElementAndAConstantRow) {
  for (const std::int32_t columns : {64, 128, 256, 512}) {
    std::vector<float> single(static_cast<std::size_t>(columns), 0.f);
    std::vector<float> equal(static_cast<std::size_t>(columns), 1.f);
    single[7] = 1;
    core::rotate_row(single.data(), columns);
    core::rotate_row(equal.data(), columns);
    const float all = 1 / std::sqrt(static_cast<float>(columns));
    for (const float x : single) EXPECT_NEAR(std::fabs(x), all, 1e-7);
    for (const float x : equal) EXPECT_LE(std::fabs(x), 1.4143f);  // not sqrt(columns)
  }
}

TEST(Rotation, QuantizedValuesAreNearestToTheRotatedRow) {
  const Granularity all[] = {
      {"tensor", {1}, 0}, {"head", {1, 2}, 0}, {"block", {1, 2, 3}, 2}, {"row", {1, 2, 5}, 1}};
  constexpr MemoryLayout kMemoryLayouts[] = {MemoryLayout::padded, MemoryLayout::heads_first,
                                             MemoryLayout::rows_first};
  Random random(17);
  int variant = 0;
  for (const std::int64_t columns : kColumns) {
    const Shape shape = {1, 2, 5, columns};
    const Matrix matrix(columns);
    for (const DType format : kCodes) {
      for (const Granularity& g : all) {
        const DType wide = kWide[variant % 3];
        SCOPED_TRACE(std::to_string(columns) + " columns, " + to_string(wide) + " " +
                     to_string(format) + " per " + g.name);
        const Tensor from =
            rearranged(draw_outliers(random, wide, shape), kMemoryLayouts[variant / 3 % 3]);
        Tensor to(format, shape, kMemoryLayouts[variant % 2]), scale(DType::f32, g.scale);
        Tensor saturated(DType::i32, g.scale);
        ++variant;
        const QuantOptions options{.block_rows = g.block_rows, .rotate = true};
        const Status status =
            quantize({from.view(), to.view(), scale.view(), saturated.view()}, options);
        ASSERT_TRUE(status.ok()) << status.message();
        Tensor largest(DType::f32, g.scale), error(DType::f32, g.scale);
        largest.fill(0), error.fill(0);
        std::vector<Row> rotated_rows;
        for_each_row(shape, [&](const Shape& at) {
          const Row x = row_of(from, at), y = matrix.times(x);
          rotated_rows.push_back(y);
          const Shape slot = slot_of(g, at);
          for (const double one : y) largest.set(slot, std::max(largest.at(slot), std::fabs(one)));
          error.set(slot, std::max(error.at(slot), rotation_error(x)));
        });
        auto next_rotated = rotated_rows.begin();
        for_each_row(shape, [&](Shape at) {
          const Row x = row_of(from, at), y = *next_rotated++;
          const Shape slot = slot_of(g, at);
          const double s = scale.at(slot);
          ASSERT_NEAR(s, largest.at(slot) / largest_of(format),
                      1e-6 * s + error.at(slot) / largest_of(format));
          ASSERT_EQ(saturated.at(slot), 0);
          for (at[3] = 0; at[3] < columns; ++at[3]) {
            const double want = y[static_cast<std::size_t>(at[3])] / s;
            ASSERT_LE(std::fabs(to.at(at) - want),
                      half_step(format, std::fabs(want) + rotation_error(x) / s) +
                          3 * kUnit * std::fabs(want) + rotation_error(x) / s)
                << at[3];
          }
        });

        // dequantize() multiplies the decoded values by the transposed matrix.
        Tensor back(DType::f32, shape, kMemoryLayouts[variant % 3]);
        ASSERT_TRUE(dequantize({to.view(), back.view(), scale.view(), {}}, options).ok());
        for_each_row(shape, [&](Shape at) {
          Row decoded = row_of(to, at);
          for (double& one : decoded) one *= scale.at(slot_of(g, at));
          const Row want = matrix.times_transpose(decoded);
          for (at[3] = 0; at[3] < columns; ++at[3]) {
            ASSERT_NEAR(back.at(at), want[static_cast<std::size_t>(at[3])],
                        2 * rotation_error(decoded));
          }
        });
      }
    }
  }
}

/// |got - want| / |want|, Euclidean.
double relative_error(const Tensor& got, const Tensor& want) {
  const std::vector<double> a = got.values(), b = want.values();
  double error2 = 0, want2 = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    error2 += (a[i] - b[i]) * (a[i] - b[i]);
    want2 += b[i] * b[i];
  }
  return std::sqrt(error2 / want2);
}

TEST(Rotation, ReducesTheErrorOfIntegersWithOutliers) {
  Random random(5);
  const Shape shape = {1, 2, 40, 128};
  const Tensor x = draw_outliers(random, DType::f32, shape);
  for (const DType format : {DType::int8, DType::u8}) {
    double error[2];
    for (const bool rotate : {false, true}) {
      Tensor to(format, shape), scale(DType::f32, {1, 2}), back(DType::f32, shape);
      const QuantOptions options{.rotate = rotate};
      ASSERT_TRUE(quantize({x.view(), to.view(), scale.view(), {}}, options).ok());
      ASSERT_TRUE(dequantize({to.view(), back.view(), scale.view(), {}}, options).ok());
      error[rotate] = relative_error(back, x);
    }
    EXPECT_LT(error[1], 0.6 * error[0]) << to_string(format);
  }
}

TEST(Rotation, GivenScalesAreKeptAndSaturationIsCounted) {
  // A row of 16 columns with one element 16 and zeros: the rotation makes every element 4 or -4.
  Tensor from(DType::bf16, {1, 1, 2, 16}), to(DType::int8, {1, 1, 2, 16});
  from.fill(0);
  from.set({0, 0, 0, 3}, 16);
  from.set({0, 0, 1, 9}, -16);
  Tensor scale = tensor_of(DType::f32, {1, 1, 2}, {0.5, 0.01}), saturated(DType::i32, {1, 1, 2});
  const QuantOptions options{.block_rows = 1, .given_scale = true, .rotate = true};
  ASSERT_TRUE(quantize({from.view(), to.view(), scale.view(), saturated.view()}, options).ok());
  EXPECT_EQ(saturated.values(), (std::vector<double>{0, 16}));
  for (std::int64_t c = 0; c < 16; ++c) {
    EXPECT_EQ(std::fabs(to.at({0, 0, 0, c})), 8);
    EXPECT_EQ(std::fabs(to.at({0, 0, 1, c})), 127);
  }
  EXPECT_NEAR(scale.at({0, 0, 1}), 0.01, 1e-8);
}

TEST(Rotation, NonFiniteValueSpoilsItsBlock) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const double bad : {std::nan(""), kInf, -kInf}) {
    for (const DType format : kCodes) {
      const Shape shape = {2, 2, 3, 48};  // blocks of 16
      Tensor from(DType::f16, shape), to(format, shape), scale(DType::f32, {2, 2});
      from.fill(1);
      from.set({1, 0, 2, 20}, bad);
      from.set({1, 0, 2, 30}, bad);
      const Tensor to_before = to, scale_before = scale;
      const Status status = quantize({from.view(), to.view(), scale.view(), {}}, {.rotate = true});
      if (format == DType::e4m3 || format == DType::e5m2) {
        ASSERT_TRUE(status.ok()) << status.message();
        for_each_index(shape, [&](const Shape& at) {
          const bool hit = at[0] == 1 && at[1] == 0 && at[2] == 2 && at[3] / 16 == 1;
          ASSERT_EQ(std::isnan(to.at(at)), hit);
        });
        EXPECT_TRUE(std::isfinite(scale.at({1, 0})));
        Tensor back(DType::f32, shape);
        ASSERT_TRUE(dequantize({to.view(), back.view(), scale.view(), {}}, {.rotate = true}).ok());
        EXPECT_TRUE(std::isnan(back.at({1, 0, 2, 16})));
        EXPECT_NEAR(back.at({1, 0, 2, 15}), 1, 0.2);
      } else {
        EXPECT_EQ(status.code(), StatusCode::invalid_argument);
        EXPECT_NE(status.message().find("from[1, 0, 2, 20] is "), std::string::npos)
            << status.message();
        EXPECT_EQ(difference(to, to_before), "");
        EXPECT_EQ(difference(scale, scale_before), "");
      }
    }
  }
}

TEST(Rotation, OverflowIsRefusedOrNan) {
  Tensor from(DType::f32, {1, 1, 1, 64}), to(DType::e4m3, {1, 1, 1, 64}), scale(DType::f32, {1});
  const Matrix matrix(64);
  for (std::int64_t c = 0; c < 64; ++c) {
    from.set({0, 0, 0, c},
             1e38 * matrix.row(c)[9] * 8);  // the rotation sums all of it into column 9
  }
  ASSERT_TRUE(quantize({from.view(), to.view(), scale.view(), {}}, {.rotate = true}).ok());
  EXPECT_TRUE(std::isnan(to.at({0, 0, 0, 9})));
  Tensor integers(DType::int8, {1, 1, 1, 64});
  const Status status =
      quantize({from.view(), integers.view(), scale.view(), {}}, {.rotate = true});
  EXPECT_NE(status.message().find("from[0, 0, 0, :] is too large"), std::string::npos)
      << status.message();
}

TEST(Rotation, RefusesMoreColumnsThanAHeadHas) {
  const Tensor from(DType::f32, {1, 1, 1, 578});
  Tensor to(DType::int8, {1, 1, 1, 578}), scale(DType::f32, {1}), back(DType::f32, {1, 1, 1, 578});
  scale.fill(1);
  for (const Status& status :
       {quantize({from.view(), to.view(), scale.view(), {}}, {.rotate = true}),
        dequantize({to.view(), back.view(), scale.view(), {}}, {.rotate = true})}) {
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_NE(status.message().find("578 columns; rotate takes at most 576"), std::string::npos)
        << status.message();
  }
}

TEST(Rotation, CAbiGivesTheSameBits) {
  Random random(9);
  const Tensor from = draw_outliers(random, DType::f32, {1, 2, 4, 32});
  Tensor to(DType::e4m3, {1, 2, 4, 32}), want(DType::e4m3, {1, 2, 4, 32});
  Tensor scale(DType::f32, {1, 2}), want_scale(DType::f32, {1, 2});
  Tensor back(DType::f32, {1, 2, 4, 32}), want_back(DType::f32, {1, 2, 4, 32});
  const QuantOptions options{.rotate = true};
  ASSERT_TRUE(quantize({from.view(), want.view(), want_scale.view(), {}}, options).ok());
  ASSERT_TRUE(dequantize({want.view(), want_back.view(), want_scale.view(), {}}, options).ok());
  CQuantCall call(from, to, scale, back);
  flashcore_quant_params& params = call.params;
  params.rotate = 1;
  flashcore_error error{};
  ASSERT_EQ(flashcore_quantize(&params, &error), FLASHCORE_OK) << error.message;
  EXPECT_EQ(difference(to, want), "");
  EXPECT_EQ(difference(scale, want_scale), "");
  call.turn_round();
  ASSERT_EQ(flashcore_dequantize(&params, &error), FLASHCORE_OK) << error.message;
  EXPECT_EQ(difference(back, want_back), "");
  params.rotate = 2;
  EXPECT_EQ(flashcore_quantize(&params, &error), FLASHCORE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error.message).find("rotate is 2"), std::string::npos) << error.message;
}

}  // namespace
}  // namespace flashcore::test
