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
  std::size_t index = 0;  ///< in the oracle of the forward pass
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

/// One pair of a row and a key. A weight of 0 contributes nothing, even if its operands are not
/// finite.
struct Pair {
  double p = 0;      ///< probability; 0: hidden
  double w = 0;      ///< dP - delta
  double slope = 1;  ///< 1 - tanh², of the softcap
  double dp_error = 0;
  double weight_error = 0;  ///< of dS before the softcap's derivative
  double dz_error = 0;      ///< of dZ
  double ds() const { return p == 0 ? 0.0 : p * w; }
  double dz() const { return p == 0 ? 0.0 : p * w * slope; }
};

/// The pairs of one row with all keys of its sequence. Completes the row's delta_error.
void find_pairs(const Problem& problem, const GradientArithmetic& arithmetic, const Keys& keys,
                const std::vector<double>& probabilities, DType dout, GradientRow& row,
                std::vector<Pair>& pairs);

/// True if dS of a row differs by a few units in the last place of 16-bit formats at most.
bool are_alike(const std::vector<Pair>& pairs);

}  // namespace flashcore::reference
