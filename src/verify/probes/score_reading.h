// Reads scores from P: with one-hot V the output is P, and log P equals the scores up to a constant
// per row. Also explains scores that differ from the oracle.
#pragma once

#include <string>
#include <vector>

#include "verify/probe_sequence.h"

namespace flashcore::verify {

class ScoreReading {
 public:
  /// Runs the call with one-hot V. readable() is false if that failed.
  ScoreReading(ProbeSequence& probes, const HostCall& call);

  bool readable() const { return !p_.empty(); }
  /// The failure of the call, if any. A refusal is not a failure.
  const std::optional<Finding>& failure() const { return failure_; }
  /// True if all scores are within their tolerance.
  bool ok() const { return lost_ == 0 && wrong_ == 0 && rms_ratio_ <= 1; }
  std::size_t lost() const { return lost_; }       ///< weights that are NaN or 0 and must not be
  double worst_sum() const { return worst_sum_; }  ///< the row sum of P farthest from 1
  bool sums_are_wrong() const { return sums_wrong_; }
  bool sums_scatter() const { return least_sum_ < 1 && most_sum_ > 1; }  ///< on both sides of 1

  /// Least squares fit got = slope · want. The residual is an RMS relative to slope · want.
  struct Fit {
    double slope = 1, residual = 0;
  };
  Fit fit() const;
  Fit fit_row(std::size_t row) const;
  double noise() const { return noise_; }  ///< RMS tolerance relative to the scores

  /// Describes the actual source of the scores; "" if no other source fits.
  std::string other_rows() const;   ///< q of other rows or heads
  std::string other_heads() const;  ///< k of other heads, per key
  /// For calls in which a score depends on one element of k: true if the scores are a wrong
  /// function of that element, for example of a wrong decode table.
  bool is_other_table() const;
  /// Permutation of the keys within a head: position j has the scores of key order[j]. Empty: none.
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
  struct RowErrors;
  void read_row(const Arithmetic& a, const reference::Oracle& oracle, std::size_t row,
                RowErrors& errors);
  void judge_row(const RowErrors& errors, std::size_t row);
  void judge_sum(const Arithmetic& a, const reference::Oracle& oracle, const RowErrors& errors,
                 std::size_t row);
  /// scale · q·k of any row and key, from the values of the call.
  double product(std::size_t row, std::size_t head_of_k, std::size_t key) const;
  /// For each column of `head`, the index (head · keys + key) of the key whose scores it has. Empty
  /// if none fits.
  std::vector<std::size_t> sources(std::size_t head) const;

  HostCall call_;
  std::optional<Finding> failure_;
  std::size_t rows_ = 0, keys_ = 0, rows_per_head_ = 0, q_heads_ = 0, kv_heads_ = 0;
  std::vector<double> p_, got_, want_, tolerance_, scales_;
  std::vector<std::uint8_t> used_;  ///< readable keys, per row
  std::size_t lost_ = 0, wrong_ = 0, worst_row_ = 0, worst_key_ = 0;
  double worst_ = 0, worst_sum_ = 1, least_sum_ = 1, most_sum_ = 1, noise_ = 0, rms_ratio_ = 0;
  double signal2_ = 0, noise2_ = 0, ratio2_ = 0, judged_ = 0;
  bool sums_wrong_ = false;
};

}  // namespace flashcore::verify
