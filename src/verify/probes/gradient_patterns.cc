// Explains a wrong reading of P or dS by lines that get another one's sum, by a delta of keys
// instead of rows, by one step of all values, by weights of tiles, and by shifted values.
#include <algorithm>
#include <cmath>

#include "verify/inputs/decimal.h"
#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

bool close(const Reading& r, std::size_t entry, double got, double want) {
  return std::fabs(got - want) <= 2 * r.bound[entry] + 1e-6 * std::fabs(want);
}

/// The lines of a gradient: rows of dq, keys of dk and dv. `inner` counts along a line's own sum.
struct Lines {
  explicit Lines(const Reading& r)
      : of_rows(r.from == kDq),
        heads(static_cast<std::size_t>(r.heads)),
        rows(static_cast<std::size_t>(r.rows)),
        keys(static_cast<std::size_t>(r.keys)) {}
  bool of_rows;
  std::size_t heads, rows, keys;

  std::size_t count() const { return of_rows ? rows : keys; }
  std::size_t length() const { return of_rows ? keys : rows; }
  std::size_t entry(std::size_t head, std::size_t line, std::size_t inner) const {
    return of_rows ? (head * rows + line) * keys + inner : (head * rows + inner) * keys + line;
  }
};

/// True if the excess of a line (got - want) equals another line: its computed or its correct
/// values.
bool has_another_line(const Reading& r, const Lines& lines, std::size_t head, std::size_t line) {
  for (std::size_t other = 0; other < lines.count(); ++other) {
    for (const std::vector<double>* values : {&r.got, &r.want}) {
      bool same = other != line;
      for (std::size_t i = 0; i < lines.length() && same; ++i) {
        const std::size_t e = lines.entry(head, line, i);
        same = close(r, e, r.got[e] - r.want[e], (*values)[lines.entry(head, other, i)]);
      }
      if (same) return true;
    }
  }
  return false;
}

/// The least step of which all values are multiples; 0: none.
double common_step(const Reading& r) {
  constexpr double kMostSteps = 2000, kOff = 0.05;
  std::vector<double> sizes;
  for (const double x : r.got) {
    if (std::isfinite(x) && x != 0) sizes.push_back(std::fabs(x));
  }
  if (sizes.size() < 12) return 0;
  std::sort(sizes.begin(), sizes.end());
  const double most = sizes.back();
  double step = sizes.front();
  for (std::size_t i = 1; i < sizes.size(); ++i) {
    const double gap = sizes[i] - sizes[i - 1];
    if (gap > most / kMostSteps / 2) step = std::min(step, gap);
  }
  if (most / step > kMostSteps || most / step < 3) return 0;
  step = most / std::round(most / step);
  const bool all = std::all_of(sizes.begin(), sizes.end(), [&](double x) {
    return std::fabs(x / step - std::round(x / step)) < kOff;
  });
  return all ? step : 0;
}

/// Runs of entries with one factor along a line; false: an entry that is not finite.
bool count_runs(const Reading& r, const Lines& lines, std::size_t head, std::size_t line,
                std::size_t& runs) {
  double low = 1, high = 0;
  for (std::size_t i = 0; i < lines.length(); ++i) {
    const std::size_t e = lines.entry(head, line, i);
    if (!std::isfinite(r.got[e])) return false;
    if (std::fabs(r.want[e]) <= 8 * r.bound[e]) continue;
    const double factor = r.got[e] / r.want[e];
    const double tolerance = 2 * r.bound[e] / std::fabs(r.want[e]) + 1e-5 * std::fabs(factor);
    if (factor - tolerance > high || factor + tolerance < low) {
      ++runs;
      low = factor - tolerance, high = factor + tolerance;
    } else {
      low = std::max(low, factor - tolerance), high = std::min(high, factor + tolerance);
    }
  }
  return true;
}

}  // namespace

Diagnosis added_lines(const Reading& r, const std::vector<std::size_t>& wrong) {
  const Lines lines(r);
  if (lines.length() < 3) return {};
  bool has_correct = false;
  for (std::size_t head = 0; head < lines.heads; ++head) {
    for (std::size_t line = 0; line < lines.count(); ++line) {
      bool is_wrong = false;
      for (std::size_t i = 0; i < lines.length(); ++i) {
        is_wrong = is_wrong || r.wrong(lines.entry(head, line, i));
      }
      has_correct = has_correct || !is_wrong;
      if (is_wrong && !has_another_line(r, lines, head, line)) return {};
    }
  }
  if (!has_correct || wrong.empty()) return {};
  return {FaultStage::accumulate,
          std::string("the sum of another ") + (lines.of_rows ? "row" : "key") + " is added to " +
              kGradientNames[r.from] + ": " + shown(r, worst_entry(r)),
          true};
}

Diagnosis delta_of_keys(const Reading& r) {
  if (r.from == kDv || r.rows < 3) return {};
  std::size_t keys_off = 0, clear = 0, seen = 0;
  for (std::int64_t line = 0; line < r.heads * r.keys; ++line) {
    double shift = 0, weight = 0;
    const auto entry = [&](std::int64_t row) { return r.at(line / r.keys, row, line % r.keys); };
    for (std::int64_t i = 0; i < r.rows; ++i) {
      const std::size_t e = entry(i);
      shift += (r.got[e] - r.want[e]) * r.dscore[e];
      weight += r.dscore[e] * r.dscore[e];
    }
    if (weight == 0) continue;
    shift /= weight;
    if (!std::isfinite(shift)) return {};
    for (std::int64_t i = 0; i < r.rows; ++i) {
      const std::size_t e = entry(i);
      if (!close(r, e, r.got[e], r.want[e] + shift * r.dscore[e])) return {};
      clear += std::fabs(shift) * r.dscore[e] > 2 * r.bound[e] ? 1 : 0;
      ++seen;
    }
    ++keys_off;
  }
  if (keys_off < 2 || 2 * clear < seen) return {};
  return {FaultStage::delta,
          "dS / P is off by one amount for all rows of a key, as with a delta of keys: " +
              shown(r, worst_entry(r)),
          true};
}

Diagnosis fixed_steps(const Reading& r) {
  const double step = common_step(r);
  if (step == 0) return {};
  std::size_t between = 0;
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    if (!(std::fabs(r.got[e] - r.want[e]) <= 1.02 * step + r.bound[e])) return {};
    const double steps = r.want[e] / step;
    between += std::fabs(steps - std::round(steps)) > 0.05 ? 1 : 0;
  }
  if (2 * between < r.got.size()) return {};
  return {
      FaultStage::precision,
      "every " + name_of(r) + " is a multiple of " + number(step) + ": " + shown(r, worst_entry(r)),
      true};
}

bool is_weighted_by_tiles(const Reading& r) {
  constexpr std::size_t kShortestTile = 4;
  const Lines lines(r);
  std::size_t runs = 0, entries = 0;
  for (std::size_t head = 0; head < lines.heads; ++head) {
    for (std::size_t line = 0; line < lines.count(); ++line) {
      bool is_wrong = false;
      for (std::size_t i = 0; i < lines.length(); ++i) {
        is_wrong = is_wrong || r.wrong(lines.entry(head, line, i));
      }
      if (!is_wrong) continue;
      if (!count_runs(r, lines, head, line, runs)) return false;
      entries += lines.length();
    }
  }
  return runs * kShortestTile <= entries || lines.length() == 1;
}

bool has_shifted_values(const Reading& r) {
  if (r.from == kDv || r.keys < 3) return false;
  const auto keys = static_cast<std::size_t>(r.keys);
  // dP of the mean of V, of its first and of its last row.
  bool fits[3] = {true, true, true};
  std::size_t rows_off = 0;
  for (std::size_t row = 0; row < static_cast<std::size_t>(r.heads * r.rows); ++row) {
    double shift = 0, weight = 0, mean = 0, size = 0;
    bool off = false;
    const auto dp = [&](std::size_t e) { return r.want[e] / r.p[e] + r.delta[row]; };
    for (std::size_t e = row * keys; e < (row + 1) * keys; ++e) {
      if (!r.visible(e)) return false;
      off = off || r.wrong(e);
      shift += (r.got[e] - r.want[e]) * r.p[e];
      weight += r.p[e] * r.p[e];
      mean += dp(e) / static_cast<double>(keys);
      size = std::max(size, std::fabs(dp(e)));
    }
    if (!off) continue;
    ++rows_off;
    const double values[] = {mean, dp(row * keys), dp((row + 1) * keys - 1)};
    for (int i = 0; i < 3; ++i) {
      fits[i] =
          fits[i] && std::fabs(std::fabs(shift / weight) - std::fabs(values[i])) < 0.02 * size;
    }
  }
  return rows_off >= 4 && (fits[0] || fits[1] || fits[2]);
}

bool is_wrong_where_small(const Reading& r) {
  double most = 0, largest_wrong = 0, largest_error = 0;
  std::size_t wrong = 0;
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    most = std::max(most, std::fabs(r.want[e]));
    if (!r.wrong(e)) continue;
    ++wrong;
    largest_wrong = std::max(largest_wrong, std::fabs(r.want[e]));
    largest_error = std::max(largest_error, std::fabs(r.got[e] - r.want[e]));
  }
  if (!(largest_error <= 0x1p-12 * most)) return false;
  return wrong > 0 && largest_wrong < 0x1p-6 * most && 2 * wrong < r.got.size();
}

}  // namespace flashcore::verify
