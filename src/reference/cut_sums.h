// Bounds of what tensor cores cut from sums of products (docs/numerics.md, "Cut sums").
#pragma once

#include <cstddef>
#include <vector>

#include "flashcore/types.h"
#include "reference/panels.h"
#include "reference/sums.h"

namespace flashcore::reference {

/// A factor of a product, and what decides how much of the product is cut. f32, since the sums of
/// tensor cores are.
struct Factor {
  float value = 0;
  float alignment = 0;  ///< power of two that the factor is aligned by, or above it
  float last_bit = 0;   ///< power of two that the factor is a multiple of; 0: unknown
};

/// `scale` is that of an 8-bit factor, included in x.
Factor factor_of(double x, DType dtype, double scale = 1);

/// The factors of one row.
struct Factors {
  std::vector<float> value, alignment, last_bit;

  Factors() = default;
  Factors(const std::vector<double>& row, DType dtype, double scale = 1);
  FactorView view() const { return {value.data(), alignment.data(), last_bit.data()}; }
};

/// The factors of a matrix; the sums are over its rows.
struct FactorPanels {
  Panels<float> value, alignment, last_bit;

  void reset(std::size_t rows, std::size_t columns);
  void set(std::size_t row, std::size_t column, const Factor& factor);
  FactorView panel(std::size_t index) const {
    return {value.panel(index), alignment.panel(index), last_bit.panel(index)};
  }
};

/// Bounds of what tensor cores cut from Σ_k x[k]·y[k][i] for each column i of a panel of y, in
/// units of 2⁻²⁴. 0 where the sum is not finite in f32.
void cut_sums(const Factors& x, const FactorPanels& y, std::size_t panel, double* bounds);

}  // namespace flashcore::reference
