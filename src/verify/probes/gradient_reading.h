// Reads P and dS back from gradients, and explains what is wrong with them.
//
// With dout one-hot, dv is P. With one-hot columns of k that q does not see, dq is dS times the
// scale; with one-hot columns of q that k does not see, dk is. So the matrix between two products
// is measured entry by entry, and by two products that share no code after it.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "verify/gradient_call.h"

namespace flashcore::verify {

/// P or dS of every query head, [batch, q_heads, rows, keys].
struct Reading {
  int from = kDv;  ///< the gradient that shows it
  std::int64_t heads = 0, rows = 0, keys = 0;
  std::vector<double> got, want, bound;
  // Of the oracle, for explanations.
  std::vector<double> p;       ///< probabilities
  std::vector<double> dscore;  ///< P times the slope of the softcap: the factor of dP - delta
  std::vector<double> delta;   ///< per row
  std::vector<double> lse;     ///< per row
  /// Wrong elements of the gradient in columns that should be 0: columns or rows are exchanged.
  std::size_t moved = 0;
  double scale = 1, head_dim = 64;
  double v_dim_scale = 1;  ///< scale if v_dim were the head dim

  std::size_t at(std::int64_t head, std::int64_t row, std::int64_t key) const {
    return static_cast<std::size_t>((head * rows + row) * keys + key);
  }
  bool wrong(std::size_t entry) const;
  /// An entry that differs from 0 by more than rounding.
  bool visible(std::size_t entry) const { return p[entry] > 0; }
};

/// "P" or "dS".
inline std::string name_of(const Reading& r) { return r.from == kDv ? "P" : "dS"; }
/// "dS of head 0, row 1, key 2 is 0.5 instead of 0.25 in dq"
std::string shown(const Reading& reading, std::size_t entry);
/// The entry with the largest error relative to its bound.
std::size_t worst_entry(const Reading& reading);

struct Readings {
  std::vector<Reading> all;
  std::optional<Finding> failure;  ///< of a call; no readings then
  std::string unwritten;           ///< elements of a gradient that no call should leave
};

/// P from dv; q, k and the options of the call.
Readings read_p(ProbeSequence& probes, const GradientCall& call);

/// dS from dq and from dk; v, dout, dlse and the options of the call, and the first `score_dims`
/// columns of its q and k. The other columns become one-hot.
Readings read_ds(ProbeSequence& probes, const GradientCall& call, std::int64_t score_dims);

/// Columns of scores when the others are used to read dS.
inline std::int64_t score_dims(std::int64_t head_dim) { return head_dim / 2; }

/// What is wrong with a reading. Stage none: nothing.
struct Diagnosis {
  FaultStage stage = FaultStage::none;
  std::string text;
  bool structural = false;       ///< a known pattern, not the fallback
  bool exchanged = false;        ///< heads, rows or keys in each other's place
  double factor = std::nan("");  ///< of all entries, if that is the fault
};
Diagnosis diagnose(const Reading& reading, FaultStage fallback);

// Patterns of dS that gradient_terms.cc knows.
/// dS / P is off by one amount for all keys of a tile: each tile has its own delta.
Diagnosis delta_of_tiles(const Reading& reading);
/// dS is that with dP, or P, of another key or row, or with dP of 0, its magnitude or a multiple.
Diagnosis wrong_term(const Reading& reading, const std::vector<std::size_t>& wrong);

// Patterns of whole lines and of all entries that gradient_patterns.cc knows.
/// dS / P is off by one amount for all rows of a key.
Diagnosis delta_of_keys(const Reading& reading);
/// A line has the sum of another line, too.
Diagnosis added_lines(const Reading& reading, const std::vector<std::size_t>& wrong);
/// All entries are multiples of one step.
Diagnosis fixed_steps(const Reading& reading);

/// The finding of all readings of dS or P together, or none. A fault that no pattern explains is
/// `fallback` if all readings have it, else the product that shows it.
Finding explain(const ProbeSequence& probes, const Readings& readings, const GradientCall& call,
                FaultStage fallback, const std::string& input);

/// Runs a call and reads it if it is wrong. `fallback` is that of a wrong dS; a wrong P is `dv`.
Finding check_call(ProbeSequence& probes, const GradientCall& call, FaultStage fallback,
                   const std::string& input);

/// The stage of gradients that are wrong where P and dS are correct or cannot be read.
FaultStage stage_by_gradients(const RanGradients& ran);

/// The factor of every entry is that of its tile along the sum: all terms of a tile count alike.
bool is_weighted_by_tiles(const Reading& reading);

/// dP is off by that of one row of V, or of their mean: delta, which has a row of its own in each
/// output, is not.
bool has_shifted_values(const Reading& reading);

/// Every wrong row of dq is off by a multiple of Σ_j P_ij k_j, as by an error of delta.
bool delta_explains(const GradientCall& call, const RanGradients& ran);

/// All errors are small beside the largest entry, and only small entries are wrong.
bool is_wrong_where_small(const Reading& reading);

/// The stage of lost or doubled terms of a sum: `tail` if the same call is correct with lengths
/// that are multiples of large tiles, else `accumulate`.
FaultStage stage_of_lost_terms(ProbeSequence& probes, const Shape& shape);

}  // namespace flashcore::verify
