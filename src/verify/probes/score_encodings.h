// Decodes the 8-bit encodings of q or k from the scores: every query has one key whose score is one
// encoding times a known factor, and one key with score 0.
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
  /// Encodings are off by different factors, each by the same factor in two places: the decode
  /// table is wrong, not the scale or some dimension.
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
