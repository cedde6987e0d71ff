// Spans of rows, their placement on ranks, and the mask between spans.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "flashcore/distributed.h"

namespace flashcore::distributed {

/// Rows [begin, end) of the whole sequence. A rank's shard is its spans one after another.
struct Span {
  std::int64_t begin = 0, end = 0;

  std::int64_t size() const noexcept { return end - begin; }
  bool operator==(const Span&) const = default;
};
using Spans = std::vector<Span>;

/// In ascending order, without empty spans, adjacent ones as one.
Spans joined(Spans spans);
std::int64_t rows_of(const Spans& spans) noexcept;
/// The rows that are in both.
Spans overlap(const Spans& a, const Spans& b);

/// The same rows in the same order, cut at each of these rows.
Spans cut_at(const Spans& spans, const std::vector<std::int64_t>& rows);

/// The spans of each rank, as equal as possible.
std::vector<Spans> place(std::int64_t length, std::int32_t ranks, Sharding sharding);
/// The spans of ranks with these numbers of rows. `name` is the tensor's, for the message.
Result<std::vector<Spans>> place(const char* name, const std::vector<std::int64_t>& rows,
                                 Sharding sharding);

/// A part of one document: ranges inside a span of queries and a span of keys, and the positions of
/// their first rows in the document.
struct Segment {
  std::int64_t q_begin, q_end, k_begin, k_end;
  std::int64_t q_start, k_start;
};

/// Documents, and the mask inside a document. The last query of a document is at its last key.
struct Mask {
  std::vector<std::int64_t> q_docs, k_docs;  ///< the first row of each document, then the length
  bool causal = false;
  std::int64_t left = -1, right = -1;  ///< visible keys on each side; -1: all. causal: right is 0

  std::vector<Segment> segments(Span q, Span k) const;
  /// True if a row of q sees a key of k.
  bool sees(Span q, Span k) const;
  /// The number of pairs of a row and a key that the mask leaves.
  std::int64_t visible(Span q, Span k) const;
  bool any_sees(const Spans& q, const Spans& k) const;
  /// The smallest span with all keys that q sees. It starts at the first key of a document, or, if
  /// `in_window`, at the first key inside the window.
  Span keys_of(Span q, bool in_window) const;
};

}  // namespace flashcore::distributed
