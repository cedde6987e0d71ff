// The oracle's inner loops. They are compiled for several instruction sets, which give the same
// bits: every sum has a fixed order, and nothing is fused (cmake/reference.cmake).
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashcore::reference {

/// Columns that a loop works on side by side (panels.h).
inline constexpr std::size_t kPanel = 16;

/// Factors of products for cut_sums.h: [count], or a panel [count][kPanel].
struct FactorView {
  const float *value, *alignment, *last_bit;
};

/// The rows of a panel that a sum takes, and their weights.
struct WeightedRows {
  const double* panel;       ///< [rows][kPanel]
  const std::int32_t* rows;  ///< [count]: which ones, ascending
  const double* weight;      ///< [count]
  std::size_t count;
};

/// Sums over keys for columns of V, kPanel each.
struct ValueSums {
  double* out;               ///< Σ w·v
  double* spread;            ///< Σ (w·v)²
  double* mass;              ///< Σ |v|
  double* scaled_mass;       ///< Σ |v|·ratio; null: not wanted
  const double* mass_ratio;  ///< [count]; null with scaled_mass
};

/// Weights of the terms of a gradient, one per row of the operand.
struct GradientWeights {
  const double *value, *error, *mass, *extra;
};

/// Sums of a gradient for kPanel columns each. They go on from their present values.
struct GradientSlice {
  double *value, *noise, *error, *mass;
  double* extra;  ///< see Sums; null for v
};

struct Sums {
  const char* isa;

  /// Σ_k x[k]·y[k][i] for each column of the panel y, and of the terms: the sum of sizes, the
  /// largest size, and the largest size of a partial sum.
  void (*scores)(const double* x, const double* y, std::size_t count, double* sum,
                 double* magnitude, double* largest_product, double* largest_sum);
  /// The first two of these.
  void (*products)(const double* x, const double* y, std::size_t count, double* sum,
                   double* magnitude);
  /// See cut_sums.h.
  void (*cut)(const FactorView& x, const FactorView& y, std::size_t count, float* bounds);

  /// Adds to sums over V. `out` is summed in blocks of kValueBlock keys.
  void (*values)(const WeightedRows& v, const ValueSums& sums);
  void (*outputs)(const WeightedRows& v, double* out);  ///< Σ w·v alone
  void (*deviations)(const WeightedRows& v, const double* out, double* deviation);  ///< Σ w·|v-out|

  /// Add the terms of some rows to a gradient: of v; of q, with extra Σ weight·operand; of k, with
  /// extra Σ (weight·operand)².
  void (*gradient_v)(const double* panel, const std::int32_t* rows, std::size_t count,
                     const GradientWeights& weights, const GradientSlice& sums);
  void (*gradient_q)(const double* panel, const std::int32_t* rows, std::size_t count,
                     const GradientWeights& weights, const GradientSlice& sums);
  void (*gradient_k)(const double* panel, const std::int32_t* rows, std::size_t count,
                     const GradientWeights& weights, const GradientSlice& sums);
};

/// Less rounding than one sum over all keys.
inline constexpr std::int32_t kValueBlock = 64;

/// The loops for the widest instruction set of this CPU.
const Sums& sums();

// One table per instruction set.
extern const Sums kGenericSums, kAvx2Sums, kAvx512Sums;

}  // namespace flashcore::reference
