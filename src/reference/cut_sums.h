// Bounds of what tensor cores cut from sums of products (docs/numerics.md, "Cut sums").
#pragma once

#include <cstddef>
#include <vector>

#include "flashcore/types.h"

namespace flashcore::reference {

/// Factors of products, and what decides how much of a product is cut. f32, since the sums of
/// tensor cores are.
struct Factors {
  std::vector<float> value;
  std::vector<float> alignment;  ///< power of two that the factor is aligned by, or above it
  std::vector<float> last_bit;   ///< power of two that the factor is a multiple of; 0: unknown

  /// `scale` is that of an 8-bit factor, included in x.
  void add(double x, DType dtype, double scale = 1);
  void clear() { value.clear(), alignment.clear(), last_bit.clear(); }
};

/// Bounds of what tensor cores cut from Σ_k x[k]·y[k][i] for each i < count, in units of 2⁻²⁴. y is
/// [x's size][count]. 0 where the sum is not finite in f32.
std::vector<double> cut_sums(const Factors& x, const Factors& y, std::size_t count);

}  // namespace flashcore::reference
