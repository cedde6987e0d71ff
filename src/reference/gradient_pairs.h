// What the rows of a problem and their keys contribute to gradients (docs/numerics.md,
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
  std::vector<double> p;  ///< probability
  std::vector<double> w;  ///< dP - delta
  std::vector<double> slope, dp_error;
  std::vector<double> weight_error;  ///< of dS before the softcap's derivative

  // Weights of operands in the gradients of v, of q and k, and in the errors of delta.
  std::vector<double> p_error, one;
  std::vector<double> dz, dz_error, dz_mass;
  std::vector<double> coherent, walk;

  bool finite = true;  ///< weights and operands: then no pair needs a look at its operands
  bool alike = true;   ///< dS differs by a few units in the last place of 16-bit formats at most

  void reset(std::size_t keys);
  double ds(std::size_t j) const { return p[j] == 0 ? 0.0 : p[j] * w[j]; }
};

/// Also completes the row's delta_error.
void find_pairs(const Problem& problem, const GradientArithmetic& arithmetic, const Keys& keys,
                const std::vector<double>& probabilities, DType dout, GradientRow& row,
                RowPairs& pairs);

}  // namespace flashcore::reference
