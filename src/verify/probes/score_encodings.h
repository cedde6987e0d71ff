// 8-bit codes of q or k read back from the scores: every query has one key whose score is one code,
// known factors aside, and another that scores 0.
#pragma once

#include <map>
#include <string>

#include "verify/probe_sequence.h"

namespace flashcore::verify {

class ScoreEncodings {
 public:
  /// Reads all codes of k, or of q.
  ScoreEncodings(ProbeSequence& probes, std::int64_t head_dim, bool of_q);

  /// The codes that are not their values, in a sentence; empty: none.
  const std::string& wrong() const { return wrong_; }
  /// Codes are off by different factors, each by the same in two places: a table, not the scale and
  /// not the product of some dimensions.
  bool is_other_table() const { return other_table_; }

 private:
  struct Read {
    double score = 0, want = 0, tolerance = 0;
    bool right() const;
    double factor() const { return score / want; }
  };
  /// Codes by their number. `turn` moves those of a group on, to other keys and dimensions.
  std::map<int, Read> read_all(ProbeSequence& probes, std::int64_t head_dim, bool of_q,
                               std::int64_t turn) const;

  std::string wrong_;
  bool other_table_ = false;
};

}  // namespace flashcore::verify
