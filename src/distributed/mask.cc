#include "distributed/mask.h"

#include <algorithm>

#include "core/error.h"

namespace flashcore::distributed {
namespace {

using ll = long long;

std::int64_t triangle(std::int64_t x) noexcept { return x > 0 ? x * (x + 1) / 2 : 0; }

/// The number of pairs 0 <= i < n, 0 <= j < m with i - j >= a.
std::int64_t pairs_at_least(std::int64_t n, std::int64_t m, std::int64_t a) noexcept {
  return triangle(n - a) - triangle(n - a - m) - triangle(-a) + triangle(-a - m);
}

std::int64_t clamped(std::int64_t row, Span span) noexcept {
  return std::min(std::max(row, span.begin), span.end);
}

bool segment_sees(const Mask& mask, const Segment& s) noexcept {
  if (s.q_begin >= s.q_end || s.k_begin >= s.k_end) return false;
  const std::int64_t q_last = s.q_start + s.q_end - s.q_begin - 1;
  const std::int64_t k_last = s.k_start + s.k_end - s.k_begin - 1;
  return (mask.left < 0 || s.q_start - k_last <= mask.left) &&
         (mask.right < 0 || s.k_start - q_last <= mask.right);
}

}  // namespace

Spans joined(Spans spans) {
  std::erase_if(spans, [](Span one) { return one.begin >= one.end; });
  std::sort(spans.begin(), spans.end(), [](Span a, Span b) { return a.begin < b.begin; });
  Spans made;
  for (const Span one : spans) {
    if (!made.empty() && made.back().end >= one.begin) {
      made.back().end = std::max(made.back().end, one.end);
    } else {
      made.push_back(one);
    }
  }
  return made;
}

std::int64_t rows_of(const Spans& spans) noexcept {
  std::int64_t sum = 0;
  for (const Span one : spans) sum += one.size();
  return sum;
}

Spans overlap(const Spans& a, const Spans& b) {
  Spans both;
  for (const Span x : a) {
    for (const Span y : b) both.push_back({std::max(x.begin, y.begin), std::min(x.end, y.end)});
  }
  return joined(std::move(both));
}

Spans cut_at(const Spans& spans, const std::vector<std::int64_t>& rows) {
  Spans made;
  for (Span rest : spans) {
    const auto first = std::upper_bound(rows.begin(), rows.end(), rest.begin);
    for (auto row = first; row != rows.end() && *row < rest.end; ++row) {
      if (*row == rest.begin) continue;  // an empty document
      made.push_back({rest.begin, *row});
      rest.begin = *row;
    }
    made.push_back(rest);
  }
  return made;
}

std::vector<Spans> place(std::int64_t length, std::int32_t ranks, Sharding sharding) {
  const std::int64_t parts = sharding == Sharding::zigzag ? 2 * std::int64_t{ranks} : ranks;
  const auto part = [&](std::int64_t i) {
    // Not i * length / parts: the product could overflow.
    const auto cut = [&](std::int64_t n) {
      return n * (length / parts) + n * (length % parts) / parts;
    };
    return Span{cut(i), cut(i + 1)};
  };
  std::vector<Spans> made;
  for (std::int64_t r = 0; r < ranks; ++r) {
    Spans own{part(r)};
    if (sharding == Sharding::zigzag) own.push_back(part(parts - 1 - r));
    made.push_back(joined(std::move(own)));
  }
  return made;
}

Result<std::vector<Spans>> place(const char* name, const std::vector<std::int64_t>& rows,
                                 Sharding sharding) {
  std::int64_t length = 0;
  for (const std::int64_t n : rows) length += n;
  const auto ranks = static_cast<std::int32_t>(rows.size());
  if (sharding == Sharding::contiguous) {
    std::vector<Spans> made;
    std::int64_t begin = 0;
    for (const std::int64_t n : rows) {
      made.push_back(joined({{begin, begin + n}}));
      begin += n;
    }
    return made;
  }
  std::vector<Spans> made = place(length, ranks, sharding);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (rows_of(made[r]) == rows[r]) continue;
    return invalid_argument(
        "%s: rank %zu: has %lld rows; zigzag placement of %lld rows on %d ranks gives it %lld. "
        "Use distributed_rows(), or contiguous shards",
        name, r, ll{rows[r]}, ll{length}, ranks, ll{rows_of(made[r])});
  }
  return made;
}

std::vector<Segment> Mask::segments(Span q, Span k) const {
  const auto first = std::max<std::ptrdiff_t>(
      std::upper_bound(q_docs.begin(), q_docs.end(), q.begin) - q_docs.begin() - 1, 0);
  const auto last = std::lower_bound(q_docs.begin(), q_docs.end(), q.end) - q_docs.begin();
  std::vector<Segment> made;
  for (auto n = first; n < last; ++n) {
    const auto i = static_cast<std::size_t>(n);
    const std::int64_t shift = (k_docs[i + 1] - k_docs[i]) - (q_docs[i + 1] - q_docs[i]);
    const std::int64_t q_begin = clamped(q_docs[i], q), q_end = clamped(q_docs[i + 1], q);
    const std::int64_t k_begin = clamped(k_docs[i], k), k_end = clamped(k_docs[i + 1], k);
    made.push_back({q_begin - q.begin, q_end - q.begin, k_begin - k.begin, k_end - k.begin,
                    q_begin - q_docs[i] + shift, std::max<std::int64_t>(k_begin - k_docs[i], 0)});
  }
  return made;
}

bool Mask::sees(Span q, Span k) const {
  for (const Segment& one : segments(q, k)) {
    if (segment_sees(*this, one)) return true;
  }
  return false;
}

std::int64_t Mask::visible(Span q, Span k) const {
  std::int64_t total = 0;
  for (const Segment& one : segments(q, k)) {
    const std::int64_t n = one.q_end - one.q_begin, m = one.k_end - one.k_begin;
    const std::int64_t first = one.q_start - one.k_start;
    if (n <= 0 || m <= 0) continue;
    total += right < 0 ? n * m : pairs_at_least(n, m, -right - first);
    total -= left < 0 ? 0 : pairs_at_least(n, m, left + 1 - first);
  }
  return total;
}

bool Mask::any_sees(const Spans& q, const Spans& k) const {
  for (const Span one : q) {
    for (const Span other : k) {
      if (sees(one, other)) return true;
    }
  }
  return false;
}

Span Mask::keys_of(Span q, bool in_window) const {
  Span found{k_docs.back(), 0};
  for (const Segment& one : segments(q, {0, k_docs.back()})) {
    if (one.q_begin >= one.q_end) continue;
    const std::int64_t size = one.k_end - one.k_begin;
    const std::int64_t q_last = one.q_start + one.q_end - one.q_begin - 1;
    const std::int64_t begin =
        in_window && left >= 0 ? std::max<std::int64_t>(one.q_start - left, 0) : 0;
    const std::int64_t end = right >= 0 ? std::min(q_last + right + 1, size) : size;
    if (begin >= end) continue;
    found.begin = std::min(found.begin, one.k_begin + begin);
    found.end = std::max(found.end, one.k_begin + end);
  }
  return found.begin < found.end ? found : Span{};
}

}  // namespace flashcore::distributed
