// Scores recovered from P: with one-hot V the output is P, and log P is the scores up to a constant
// per row. What explains scores that are not the oracle's is looked for here.
#pragma once

#include <string>
#include <vector>

#include "verify/probe_sequence.h"

namespace flashcore::verify {

class ScoreReading {
 public:
  /// Runs the call with one-hot values. `readable()` is false where it could not be run.
  ScoreReading(ProbeSequence& probes, const HostCall& call);

  bool readable() const { return !p_.empty(); }
  /// Why it could not be run; a refusal is none.
  const std::optional<Finding>& failure() const { return failure_; }
  /// All scores right, and P adds up to 1.
  bool ok() const { return lost_ == 0 && wrong_ == 0 && rms_ratio_ <= 1; }
  std::size_t lost() const { return lost_; }       ///< weights that are NaN or 0 and should not be
  double worst_sum() const { return worst_sum_; }  ///< the row sum of P farthest from 1
  bool sums_are_wrong() const { return sums_wrong_; }
  bool sums_scatter() const { return least_sum_ < 1 && most_sum_ > 1; }  ///< on both sides of 1

  /// Least squares got = slope · want, and the rest as a share of slope · want (root mean square).
  struct Fit {
    double slope = 1, residual = 0;
  };
  Fit fit() const;
  Fit fit_row(std::size_t row) const;
  double noise() const { return noise_; }  ///< tolerance as a share of the scores, RMS

  /// Where the scores really come from: names it, or "" where nothing else fits.
  std::string other_rows() const;   ///< q of other rows or heads
  std::string other_heads() const;  ///< k of other heads, key by key
  /// Where every score hangs on one element of k: scores are a function of that element, only not
  /// the right one, as when a table of codes is wrong.
  bool is_other_table() const;
  /// k of other keys of the same head: key j's scores stand at place[j]. Empty: no.
  std::vector<std::int64_t> key_order() const;

  std::size_t rows() const { return rows_; }
  std::size_t worst_row() const { return worst_row_; }
  std::size_t worst_key() const { return worst_key_; }
  double got(std::size_t row, std::size_t key) const { return got_[row * keys_ + key]; }
  double want(std::size_t row, std::size_t key) const { return want_[row * keys_ + key]; }
  /// 8-bit: scales of q, k and v.
  const std::vector<double>& scales() const { return scales_; }
  Evidence evidence() const;

 private:
  void centre(const ProbeSequence& probes, const reference::Oracle& oracle);
  /// scale · q·k of any row and any key, from the call's own values.
  double product(std::size_t row, std::size_t head_of_k, std::size_t key) const;
  /// Keys (head · keys + key) whose scores columns 0, 1, ... of `head` show; empty: none fit.
  std::vector<std::size_t> sources(std::size_t head) const;

  HostCall call_;
  std::optional<Finding> failure_;
  std::size_t rows_ = 0, keys_ = 0, rows_per_head_ = 0, q_heads_ = 0, kv_heads_ = 0;
  std::vector<double> p_, got_, want_, tolerance_, scales_;
  std::vector<std::uint8_t> used_;  ///< keys that can be read, per row
  std::size_t lost_ = 0, wrong_ = 0, worst_row_ = 0, worst_key_ = 0;
  double worst_ = 0, worst_sum_ = 1, least_sum_ = 1, most_sum_ = 1, noise_ = 0, rms_ratio_ = 0;
  bool sums_wrong_ = false;
};

}  // namespace flashcore::verify
