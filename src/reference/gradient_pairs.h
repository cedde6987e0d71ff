// Pairs of a query row and a key: their P, dP and dS, and the errors of these (docs/numerics.md,
// "Gradients").
#pragma once

#include <cstdint>
#include <vector>

#include "reference/cut_sums.h"
#include "reference/elements.h"
#include "reference/oracle_bwd.h"
#include "reference/panels.h"

namespace flashcore::reference {

inline constexpr double kMayUnderflow = 1e-30;  ///< a weight below this may be 0 in f32

/// K and V of one (batch, KV head), as rows and transposed.
struct Keys {
  std::int64_t b = -1, head = -1;
  Lengths lengths{};
  Panels<double> k, k_transposed;  // the latter with a softcap only
  Panels<double> v_transposed;
  FactorPanels v_factors;  // of v transposed; empty unless tensor cores multiply it
  std::vector<std::uint8_t> k_finite;
};

void load_keys(const Problem& problem, const Tensors& tensors, std::int64_t b, std::int64_t head,
               bool cuts_sums, Keys& keys);

/// One query row: its operands, delta and the errors that all of its pairs share.
struct GradientRow {
  RowId id{};
  std::vector<double> q, dout;
  bool q_finite = true, dout_finite = true;
  double delta = 0;
  double delta_error = 0;  ///< of delta
  double score_error = 0;  ///< of a score, absolute
  double p_error = 0;      ///< of P, relative, from scores in a narrow format
};

GradientRow read_row(const Problem& problem, const Tensors& tensors, const Gradients& gradients,
                     const GradientArithmetic& arithmetic, const Keys& keys, const Oracle& forward,
                     std::size_t r);

/// The pairs of one row with the keys of its sequence, by key. 0 where P is 0: such a pair
/// contributes nothing, even if its operands are not finite.
struct RowPairs {
  std::vector<double> p;             ///< probability
  std::vector<double> w;             ///< dP - delta
  std::vector<double> slope;         ///< 1 - tanh², of the softcap; empty without one
  std::vector<double> weight_error;  ///< of dS before the softcap's derivative
  std::vector<double> dz, dz_error;
  std::vector<double> dz_mass;   ///< 1 + |w|; 0 if dZ is 0
  std::vector<double> coherent;  ///< P · slope; empty without a softcap

  std::int64_t seen = 0;  ///< pairs whose P is not 0
  bool finite = true;     ///< weights and operands: then no pair needs a look at its operands
  bool alike = true;      ///< dS differs by a few units in the last place of 16-bit formats at most

  void resize(std::size_t keys, bool softcap);
  void clear(std::size_t first, std::size_t last);
  double ds(std::size_t j) const { return p[j] == 0 ? 0.0 : p[j] * w[j]; }
  double slope_at(std::size_t j) const { return slope.empty() ? 1.0 : slope[j]; }
  const double* weights_of_delta() const { return coherent.empty() ? p.data() : coherent.data(); }
};

/// Also completes the row's delta_error.
void find_pairs(const Problem& problem, const GradientArithmetic& arithmetic, const Keys& keys,
                const std::vector<double>& probabilities, DType dout, GradientRow& row,
                RowPairs& pairs);

}  // namespace flashcore::reference
