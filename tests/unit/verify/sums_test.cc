// The oracle's loops give the same bits on every instruction set.
#include "reference/sums.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "verify/inputs/random.h"

namespace flashcore::test {
namespace {

using reference::kPanel;
using reference::Sums;
using verify::Random;

std::vector<const Sums*> wide_tables() {
  std::vector<const Sums*> tables;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) tables.push_back(&reference::kAvx2Sums);
  if (__builtin_cpu_supports("avx512f")) tables.push_back(&reference::kAvx512Sums);
#endif
  return tables;
}

/// Numbers of many sizes; a few are 0, infinite or NaN.
template <typename T>
std::vector<T> draw(Random& random, std::size_t count, bool finite) {
  std::vector<T> values(count);
  for (T& x : values) {
    const int power = static_cast<int>(random.between(-12, 12));
    x = static_cast<T>(std::ldexp(random.normal(), power));
    if (random.chance(0.05)) x = 0;
    if (!finite && random.chance(0.02)) x = std::numeric_limits<T>::infinity();
    if (!finite && random.chance(0.02)) x = std::numeric_limits<T>::quiet_NaN();
  }
  return values;
}

/// All results of a table for one set of inputs.
std::vector<double> results_of(const Sums& table, std::uint64_t seed) {
  Random random(seed, 60);
  const bool finite = random.chance(0.7);
  const auto rows = static_cast<std::size_t>(random.between(1, 150));
  const auto x = draw<double>(random, rows, finite);
  const auto y = draw<double>(random, rows * kPanel, finite);
  std::vector<double> all;
  const auto note = [&](const auto& values) { all.insert(all.end(), values, values + kPanel); };

  double a[kPanel], b[kPanel], c[kPanel], d[kPanel];
  table.scores(x.data(), y.data(), rows, a, b, c, d);
  for (const auto* values : {a, b, c, d}) note(values);
  table.products(x.data(), y.data(), rows, a, b);
  for (const auto* values : {a, b}) note(values);

  const auto factors = draw<float>(random, 3 * rows, finite);
  const auto panels = draw<float>(random, 3 * rows * kPanel, finite);
  const float *f = factors.data(), *g = panels.data();
  float bounds[kPanel];
  table.cut({f, f + rows, f + 2 * rows}, {g, g + rows * kPanel, g + 2 * rows * kPanel}, rows,
            bounds);
  note(bounds);

  std::vector<std::int32_t> keys;
  for (std::size_t j = 0; j < rows; ++j) {
    if (random.chance(0.8)) keys.push_back(static_cast<std::int32_t>(j));
  }
  const reference::WeightedRows v{y.data(), keys.data(), x.data(), keys.size()};
  const auto ratios = draw<double>(random, rows, true);
  table.values(v, {a, b, c, d, ratios.data()});
  for (const auto* values : {a, b, c, d}) note(values);
  table.deviations(v, a, b);
  note(b);
  table.outputs(v, a);
  note(a);

  const auto weights = draw<double>(random, 8 * rows, finite);
  const double* w = weights.data();
  for (const auto gradient : {table.gradient_v, table.gradient_q, table.gradient_k}) {
    double slice[5][kPanel] = {};
    slice[0][3] = slice[4][5] = 1.5;
    gradient(y.data(), keys.data(), keys.size(), {w, w + rows, w + 2 * rows, w + 3 * rows},
             {slice[0], slice[1], slice[2], slice[3], slice[4]});
    for (const auto& values : slice) note(values);
  }
  return all;
}

TEST(Sums, HaveTheSameBitsOnAllInstructionSets) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const std::vector<double> expected = results_of(reference::kGenericSums, seed);
    for (const Sums* table : wide_tables()) {
      const std::vector<double> found = results_of(*table, seed);
      ASSERT_EQ(found.size(), expected.size());
      for (std::size_t i = 0; i < found.size(); ++i) {
        if (std::isnan(expected[i]) && std::isnan(found[i])) continue;
        ASSERT_EQ(std::bit_cast<std::uint64_t>(found[i]), std::bit_cast<std::uint64_t>(expected[i]))
            << table->isa << ", seed " << seed << ", result " << i;
      }
    }
  }
}

// By the definitions of sums.h, for terms whose sums are exact.
TEST(Sums, ByHand) {
  constexpr std::size_t kRows = 3;
  const double x[kRows] = {2, -3, 1};
  double y[kRows * kPanel];
  for (std::size_t k = 0; k < kRows; ++k) {
    for (std::size_t i = 0; i < kPanel; ++i) y[k * kPanel + i] = static_cast<double>(k + i);
  }
  const std::int32_t rows[] = {0, 2};
  const double value_weight[] = {2, 0, -1}, error_weight[] = {0.5, 0, 0.25};
  const double mass_weight[] = {1, 0, 4}, extra_weight[] = {3, 0, 5};
  for (const Sums* table : {&reference::kGenericSums, &reference::sums()}) {
    double sum[kPanel], magnitude[kPanel], product[kPanel], partial[kPanel];
    table->scores(x, y, kRows, sum, magnitude, product, partial);
    // Column 4: 2·4 - 3·5 + 6.
    EXPECT_EQ(sum[4], -1);
    EXPECT_EQ(magnitude[4], 29);
    EXPECT_EQ(product[4], 15);
    EXPECT_EQ(partial[4], 8);
    double out[kPanel], spread[kPanel], mass[kPanel], scaled[kPanel], deviation[kPanel];
    const double ratio[] = {1, 10};
    const reference::WeightedRows v{y, rows, x, 2};  // weights 2 and -3
    table->values(v, {out, spread, mass, scaled, ratio});
    EXPECT_EQ(out[4], 2 * 4 - 3 * 6);
    EXPECT_EQ(spread[4], 64 + 18 * 18);
    EXPECT_EQ(mass[4], 10);
    EXPECT_EQ(scaled[4], 64);
    table->deviations(v, out, deviation);
    EXPECT_EQ(deviation[4], 2 * 14 - 3 * 16);
    for (const bool squares : {false, true}) {
      double value[kPanel] = {}, noise[kPanel] = {}, error[kPanel] = {};
      double magnitudes[kPanel] = {}, extra[kPanel] = {};
      const auto gradient = squares ? table->gradient_k : table->gradient_q;
      gradient(y, rows, 2, {value_weight, error_weight, mass_weight, extra_weight},
               {value, noise, error, magnitudes, extra});
      EXPECT_EQ(value[4], 2 * 4 - 6);
      EXPECT_EQ(noise[4], 64 + 36);
      EXPECT_EQ(error[4], 0.5 * 4 + 0.25 * 6);
      EXPECT_EQ(magnitudes[4], 4 + 4 * 6);
      EXPECT_EQ(extra[4], squares ? 12 * 12 + 30 * 30 : 12 + 30);
    }
  }
}

}  // namespace
}  // namespace flashcore::test
