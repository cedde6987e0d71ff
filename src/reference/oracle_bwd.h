// The fp64 oracle of gradients: the formulas of docs/numerics.md, "Gradients", pair by pair and
// without tiles. Like the forward oracle it shares no code with the kernels. All tensors must be in
// host memory.
#pragma once

#include <cstdint>
#include <vector>

#include "flashcore/backward.h"
#include "reference/oracle.h"

namespace flashcore::reference {

/// The arithmetic that the terms of the error bound assume.
struct GradientArithmetic {
  double sum_unit = 0x1p-24;    ///< unit roundoff of sums
  bool truncates_sums = false;  ///< tensor cores truncate the sum of a score
  /// Unit roundoffs of an implementation that stores more than P and dS in a narrow format; 0: f32.
  double score_unit = 0;               ///< of q and k times a part of the scale, and of the scores
  double dp_unit = 0;                  ///< of dP, and of the delta that is summed from it
  std::vector<double> out_error = {};  ///< [rows, v_dim]: of out, if delta reads another; empty: 0
};

/// One gradient in the logical order of its tensor, and the terms of its error bound
/// (verify/inputs/compare_bwd.h).
struct Gradient {
  std::vector<double> value;
  std::vector<double> noise;          ///< Σ term²; the square root is the step of a random walk
  std::vector<double> error;          ///< Σ |error of a weight| · |operand|
  std::vector<double> mass;           ///< Σ |operand|, for weights that are flushed to 0
  std::vector<double> alike;          ///< Σ |term| of dq where weights of a row are nearly equal
  std::vector<double> terms;          ///< number of terms
  std::vector<std::uint8_t> excused;  ///< a weight that may underflow meets a non-finite operand

  void resize(std::size_t count, bool given);
};

struct GradientOracle {
  Gradient dq, dk, dv, dbias, dsinks;
  std::vector<double> dslopes;  ///< of alibi_slopes, [q_heads] or [batch, q_heads]; no bound

  // Stages, on request only, by the rows of all_rows(): one value per row, or per key of the row.
  std::vector<double> delta;            ///< Σ dout·out - dlse; 0 for a row without keys
  std::vector<std::vector<double>> ds;  ///< gradients of the final scores
};

/// The parts of the forward oracle that gradients use.
inline constexpr OracleParts kPartsForGradients{.bound = false, .stages = true};

/// Computes all gradients that exist, whether or not the call wants them. P is that of the inputs
/// in f64, delta uses `tensors.out` as stored. `gradients` needs dout (and dlse) only.
GradientOracle compute_gradients(const Problem& problem, const Tensors& tensors,
                                 const Gradients& gradients, const GradientArithmetic& arithmetic,
                                 bool keep_stages = false);

/// The same with the oracle of the forward pass, which has kPartsForGradients at least.
GradientOracle compute_gradients(const Problem& problem, const Tensors& tensors,
                                 const Gradients& gradients, const GradientArithmetic& arithmetic,
                                 const Oracle& forward, bool keep_stages = false);

}  // namespace flashcore::reference
