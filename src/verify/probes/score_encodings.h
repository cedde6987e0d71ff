// Reads the decoded values of all 8-bit encodings of q or k from the scores. Every query has one
// key with the score encoding times a known factor, and one key with score 0.
#pragma once

#include <map>
#include <string>

#include "verify/probe_sequence.h"

namespace flashcore::verify {

class ScoreEncodings {
 public:
  /// Reads all encodings of k, or of q.
  ScoreEncodings(ProbeSequence& probes, std::int64_t head_dim, bool of_q);

  /// Describes the wrong encodings; empty: none.
  const std::string& wrong() const { return wrong_; }
  /// True if the decode table is wrong, not the scale or some dimension: encodings are off by
  /// different factors, each by the same factor at two positions.
  bool is_other_table() const { return other_table_; }

 private:
  struct Read {
    double score = 0, want = 0, tolerance = 0;
    bool right() const;
    double factor() const { return score / want; }
  };
  /// Scores by encoding. `turn` moves the encodings of a group to other keys and dimensions.
  std::map<int, Read> read_all(ProbeSequence& probes, std::int64_t head_dim, bool of_q,
                               std::int64_t turn) const;

  std::string wrong_;
  bool other_table_ = false;
};

}  // namespace flashcore::verify
